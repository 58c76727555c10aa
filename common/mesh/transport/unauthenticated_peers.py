"""Connection limits of a ROUTER, which ZeroMQ lacks.

They bound the connections per address, the unauthenticated connections, and the bytes that an
unauthenticated connection may send. ZeroMQ reports accepted and closed descriptors, but no
successful handshakes. The kernel's byte counters show them: an unauthenticated peer was sent a
greeting and a WELCOME, an authenticated one also READY. This module shuts excess connections down,
and ZeroMQ then closes them. It runs on the ZAP authenticator's thread.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass

POLL_S = 0.25  # seconds between two checks of unauthenticated connections
# Seconds per connection, while there are too many: a check of one takes about 10 us.
CHECK_COST_S = 5e-5
# Sent before authentication: 64 bytes of greeting, 170 of WELCOME, 12 of an ERROR. The READY
# after it has about 65.
MAX_HANDSHAKE_SENT_BYTES = 256
# Bytes received, sent, and sent again, in Linux' tcp_info
_TCP_INFO = struct.Struct("<128xQ64xQQ")


@dataclass(frozen=True)
class ConnectionLimits:
    """Connection limits of one process."""

    per_address: int = 2048  # from one address: every process of a host has one
    unauthenticated: int = 1024  # of all addresses; ZeroMQ drops each after 30 s
    unauthenticated_per_address: int = 256  # all processes of a host may start at once
    unauthenticated_bytes: int = 65_536  # per connection; a handshake takes under 1 KiB


@dataclass
class _AcceptedConnection:
    peer: tuple[str, int]
    origin: str


class UnauthenticatedPeers:
    """Connections of one ROUTER by their descriptors."""

    def __init__(self, limits: ConnectionLimits, rejected: Counter[str]) -> None:
        """Create the table. `rejected` counts shut-down connections by reason."""
        self._limits, self._rejected = limits, rejected
        self._checked_at = 0.0
        self._connections: dict[int, _AcceptedConnection] = {}
        self._unauthenticated: dict[int, _AcceptedConnection] = {}
        # connections by origin, and unauthenticated ones
        self._count_by_origin: Counter[str] = Counter()
        self._unauthenticated_by_origin: Counter[str] = Counter()

    def check_if_due(self) -> int | None:
        """Check the unauthenticated connections if it is time.

        Returns the milliseconds to the next check, or None without such connections.
        """
        self._check_after(POLL_S)
        return int(1000 * POLL_S) if self._unauthenticated else None

    def add_connection(self, descriptor: int) -> None:
        """Add a connection that ZeroMQ has accepted."""
        self.remove_connection(descriptor)
        try:
            with _duplicate_socket(descriptor) as end:
                peer = end.getpeername()[:2]
        except OSError:  # it is closed already
            return
        found = _AcceptedConnection(peer, _find_origin(peer[0]))
        self._connections[descriptor] = self._unauthenticated[descriptor] = found
        self._count_by_origin[found.origin] += 1
        self._unauthenticated_by_origin[found.origin] += 1
        if self._count_by_origin[found.origin] > self._limits.per_address:
            self._shut_down(descriptor, "connections")
        elif self._too_many(found.origin):
            # some may be authenticated by now
            self._check_after(CHECK_COST_S * len(self._unauthenticated))
            if descriptor in self._unauthenticated and self._too_many(found.origin):
                self._shut_down(descriptor, "strangers")

    def remove_connection(self, descriptor: int) -> None:
        """Remove a connection that ZeroMQ has closed."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            _decrement(self._count_by_origin, connection.origin)
            self._mark_authenticated(descriptor)

    def _check_after(self, seconds: float) -> None:
        if self._unauthenticated and time.monotonic() >= self._checked_at + seconds:
            self._checked_at = time.monotonic()
            self._check()

    def _check(self) -> None:
        """Find newly authenticated connections, and shut down those that send too much."""
        for descriptor, connection in list(self._unauthenticated.items()):
            try:
                with _duplicate_socket(descriptor) as end:
                    if end.getpeername()[:2] != connection.peer:
                        continue  # ZeroMQ is about to report its end
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            except OSError:
                continue
            received, sent, again = _TCP_INFO.unpack(info)
            if sent - again > MAX_HANDSHAKE_SENT_BYTES:
                self._mark_authenticated(descriptor)
            elif received > self._limits.unauthenticated_bytes:
                self._shut_down(descriptor, "bytes")

    def _mark_authenticated(self, descriptor: int) -> None:
        connection = self._unauthenticated.pop(descriptor, None)
        if connection is not None:
            _decrement(self._unauthenticated_by_origin, connection.origin)

    def _too_many(self, origin: str) -> bool:
        limits = self._limits
        return (
            len(self._unauthenticated) > limits.unauthenticated
            or self._unauthenticated_by_origin[origin] > limits.unauthenticated_per_address
        )

    def _shut_down(self, descriptor: int, why: str) -> None:
        connection = self._connections[descriptor]
        self.remove_connection(descriptor)
        try:
            with _duplicate_socket(descriptor) as end:
                if end.getpeername()[:2] == connection.peer:
                    end.shutdown(socket.SHUT_RDWR)
                    self._rejected[why] += 1
        except OSError:  # it is closed already
            pass


def _duplicate_socket(descriptor: int) -> socket.socket:
    """Duplicate ZeroMQ's socket, so that its descriptor stays valid after ZeroMQ closes it.

    Raises OSError if it is closed already; a file may have its number by now.
    """
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _find_origin(host: str) -> str:
    """Return the address that a peer counts under: the /64 network for IPv6, as each user has
    2^64.
    """
    found = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, 64), strict=False))
    return host


def _decrement(counter: Counter[str], origin: str) -> None:
    counter[origin] -= 1
    if not counter[origin]:
        del counter[origin]
