"""Where processes listen: an interface, and the ports to try there, the first free one of which a
process takes.
"""

from __future__ import annotations

import errno
import socket

from meshrl.common.base.errors import ConfigError

ANY = range(0, 1)  # as the system gives them
ANYWHERE = ("*", "0.0.0.0", "::", "[::]")  # interfaces that are no address to be reached at


class Taken(ConfigError):
    """Another process listens there, which may end."""

    code = "address_taken"
    retryable = True


def refused(error: OSError | None) -> type[ConfigError]:
    """What it is that nobody can listen at a port."""
    taken = error is not None and error.errno == errno.EADDRINUSE
    return Taken if taken else ConfigError


def ports(where: str, setting: str) -> tuple[str, range]:
    """Interface and ports of `HOST:*`, `HOST:PORT` or `HOST:LOW-HIGH`, with `tcp://` before it or
    without; ConfigError, which names the `setting`, for anything else.
    """
    interface, _, behind = where.removeprefix("tcp://").rpartition(":")
    low, _, high = behind.partition("-")
    try:
        found = ANY if behind == "*" else range(int(low), int(high or low) + 1)
    except ValueError:
        found = range(0)
    if not interface or not found or found[0] < 0 or found[-1] > 65535:
        raise ConfigError(
            f"{where!r} is no place to listen at",
            where=setting,
            fix="Write HOST:*, HOST:PORT or HOST:LOW-HIGH",
        )
    return interface, found


def bare(interface: str) -> tuple[str, socket.AddressFamily]:
    """The interface as plain sockets take it, without the brackets of IPv6, and its family."""
    if interface.startswith("["):
        return interface.strip("[]"), socket.AF_INET6
    return interface.replace("*", ""), socket.AF_INET


def shown(host: str) -> str:
    """A host as it stands in an address: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
