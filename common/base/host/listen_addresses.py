"""Where processes listen: an interface, and the ports to try there, the first free one of which a
process takes.
"""

from __future__ import annotations

import errno
import socket

from meshrl.common.base.errors import ConfigError

EPHEMERAL_PORTS = range(0, 1)  # as the system gives them
WILDCARD_HOSTS = ("*", "0.0.0.0", "::", "[::]")  # interfaces that are no address to be reached at


class AddressInUse(ConfigError):
    """Another process listens there, which may end."""

    code = "address_taken"
    retryable = True


def bind_error_type(error: OSError | None) -> type[ConfigError]:
    """What it is that nobody can listen at a port."""
    taken = error is not None and error.errno == errno.EADDRINUSE
    return AddressInUse if taken else ConfigError


def parse_listen_address(address: str, setting: str) -> tuple[str, range]:
    """Interface and ports of `HOST:*`, `HOST:PORT` or `HOST:LOW-HIGH`, with `tcp://` before it or
    without; ConfigError, which names the `setting`, for anything else.
    """
    interface, _, behind = address.removeprefix("tcp://").rpartition(":")
    low, _, high = behind.partition("-")
    try:
        found = EPHEMERAL_PORTS if behind == "*" else range(int(low), int(high or low) + 1)
    except ValueError:
        found = range(0)
    if not interface or not found or found[0] < 0 or found[-1] > 65535:
        raise ConfigError(
            f"{address!r} is no place to listen at",
            where=setting,
            fix="Write HOST:*, HOST:PORT or HOST:LOW-HIGH",
        )
    return interface, found


def parse_socket_host(interface: str) -> tuple[str, socket.AddressFamily]:
    """The interface as plain sockets take it, without the brackets of IPv6, and its family."""
    if interface.startswith("["):
        return interface.strip("[]"), socket.AF_INET6
    return interface.replace("*", ""), socket.AF_INET


def format_host(host: str) -> str:
    """A host as it stands in an address: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
