"""Listen addresses of processes: an interface and its ports, of which a process takes the first
free one.
"""

from __future__ import annotations

import errno
import socket

from meshrl.common.base.errors import ConfigError

EPHEMERAL_PORTS = range(0, 1)  # chosen by the system
WILDCARD_HOSTS = (
    "*",
    "0.0.0.0",
    "::",
    "[::]",
)  # wildcard interfaces, which clients cannot connect to


class AddressInUse(ConfigError):
    """Error raised while another process, which may exit, listens at the address."""

    code = "address_taken"
    retryable = True


def bind_error_type(error: OSError | None) -> type[ConfigError]:
    """Return the type of the error that no process can listen at a port."""
    is_in_use = error is not None and error.errno == errno.EADDRINUSE
    return AddressInUse if is_in_use else ConfigError


def parse_listen_address(address: str, setting: str) -> tuple[str, range]:
    """Parse `HOST:*`, `HOST:PORT` or `HOST:LOW-HIGH`, optionally after `tcp://`, to interface and
    ports.

    Raises ConfigError, which names the `setting`, for anything else.
    """
    interface, _, behind = address.removeprefix("tcp://").rpartition(":")
    low, _, high = behind.partition("-")
    try:
        found = EPHEMERAL_PORTS if behind == "*" else range(int(low), int(high or low) + 1)
    except ValueError:
        found = range(0)
    if not interface or not found or found[0] < 0 or found[-1] > 65535:
        raise ConfigError(
            f"{address!r} is not a listen address",
            where=setting,
            fix="Write HOST:*, HOST:PORT or HOST:LOW-HIGH",
        )
    return interface, found


def parse_socket_host(interface: str) -> tuple[str, socket.AddressFamily]:
    """Return the interface for plain sockets, without the brackets of IPv6, and its address
    family.
    """
    if interface.startswith("["):
        return interface.strip("[]"), socket.AF_INET6
    return interface.replace("*", ""), socket.AF_INET


def format_host(host: str) -> str:
    """Format a host for an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
