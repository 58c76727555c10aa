"""Limits of connections to a ROUTER, which ZeroMQ has none of: how many come from one address, how
many have proved no key yet, and how much such a one may send.

ZeroMQ says which descriptor it has accepted and which it has lost, not whose handshake has
succeeded. The kernel tells: who has proved nothing was sent a greeting and a WELCOME, and who has
was sent READY behind them. What is too much is shut down here; ZeroMQ then finds its end. Runs on
the doorkeeper's thread.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass

POLL_S = 0.25  # between two looks at those that have proved nothing
# The same for each of them, while they are too many: a look at one takes some 10 us.
CHECK_COST_S = 5e-5
# What this end has sent before a proof: 64 bytes of greeting, 170 of WELCOME, 12 of an ERROR; the
# READY that follows a proof has some 65.
MAX_HANDSHAKE_SENT_BYTES = 256
# Bytes received, sent, and sent again, in Linux' tcp_info
_TCP_INFO = struct.Struct("<128xQ64xQQ")


@dataclass(frozen=True)
class ConnectionLimits:
    """Of connections, at one process."""

    per_address: int = 2048  # from one address, proved or not: every process of a host has one
    unauthenticated: int = 1024  # that have proved nothing, together; ZeroMQ drops each after 30 s
    unauthenticated_per_address: int = 256  # of them: all processes of a host may begin at once
    unauthenticated_bytes: int = 65_536  # from one of them; a handshake takes under 1 KiB


@dataclass
class _AcceptedConnection:
    peer: tuple[str, int]
    origin: str


class UnauthenticatedPeers:
    """Knows the connections of one ROUTER by their descriptors."""

    def __init__(self, limits: ConnectionLimits, rejected: Counter[str]) -> None:
        """`refused` counts by reason: "connections", "strangers" or "bytes"."""
        self._limits, self._rejected = limits, rejected
        self._checked_at = 0.0
        self._connections: dict[int, _AcceptedConnection] = {}
        self._unauthenticated: dict[int, _AcceptedConnection] = {}
        self._count_by_origin: Counter[str] = (
            Counter()
        )  # connections by origin, and those of strangers
        self._unauthenticated_by_origin: Counter[str] = Counter()

    def check_if_due(self) -> int | None:
        """Looks at those that have proved nothing, if it is time; in how many ms the next look is
        due, None while there are none.
        """
        self._check_after(POLL_S)
        return int(1000 * POLL_S) if self._unauthenticated else None

    def add_connection(self, descriptor: int) -> None:
        """ZeroMQ has accepted a connection."""
        self.remove_connection(descriptor)
        try:
            with _duplicate_socket(descriptor) as end:
                peer = end.getpeername()[:2]
        except OSError:  # it has gone again
            return
        found = _AcceptedConnection(peer, _find_origin(peer[0]))
        self._connections[descriptor] = self._unauthenticated[descriptor] = found
        self._count_by_origin[found.origin] += 1
        self._unauthenticated_by_origin[found.origin] += 1
        if self._count_by_origin[found.origin] > self._limits.per_address:
            self._shut_down(descriptor, "connections")
        elif self._too_many(found.origin):
            self._check_after(
                CHECK_COST_S * len(self._unauthenticated)
            )  # some may have proved a key
            if descriptor in self._unauthenticated and self._too_many(found.origin):
                self._shut_down(descriptor, "strangers")

    def remove_connection(self, descriptor: int) -> None:
        """ZeroMQ has lost it."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            _decrement(self._count_by_origin, connection.origin)
            self._mark_authenticated(descriptor)

    def _check_after(self, seconds: float) -> None:
        if self._unauthenticated and time.monotonic() >= self._checked_at + seconds:
            self._checked_at = time.monotonic()
            self._check()

    def _check(self) -> None:
        """Finds out who has proved a key, and shuts who sends too much."""
        for descriptor, connection in list(self._unauthenticated.items()):
            try:
                with _duplicate_socket(descriptor) as end:
                    if end.getpeername()[:2] != connection.peer:
                        continue  # its end is about to be told
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
        except OSError:  # it has gone by itself
            pass


def _duplicate_socket(descriptor: int) -> socket.socket:
    """A socket of our own for ZeroMQ's: it stays the same one however soon that is closed. OSError:
    it has been, and by now perhaps a file has its number.
    """
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _find_origin(host: str) -> str:
    """The address that a peer is counted by: whoever has one of IPv6 has 2^64 of them."""
    found = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, 64), strict=False))
    return host


def _decrement(counter: Counter[str], origin: str) -> None:
    counter[origin] -= 1
    if not counter[origin]:
        del counter[origin]
