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

LOOK_S = 0.25  # between two looks at those that have proved nothing
# The same for each of them, while they are too many: a look at one takes some 10 us.
CROWDED_S = 5e-5
# What this end has sent before a proof: 64 bytes of greeting, 170 of WELCOME, 12 of an ERROR; the
# READY that follows a proof has some 65.
BEFORE_PROOF = 256
# Bytes received, sent, and sent again, in Linux' tcp_info
_INFO = struct.Struct("<128xQ64xQQ")


@dataclass(frozen=True)
class Limits:
    """Of connections, at one process."""

    from_one: int = 2048  # from one address, proved or not: every process of a host has one
    strangers: int = 1024  # that have proved nothing, together; ZeroMQ drops each after 30 s
    strangers_from_one: int = 256  # of them: all processes of a host may begin at once
    bytes: int = 65_536  # from one of them; a handshake takes under 1 KiB


@dataclass
class _Connection:
    peer: tuple[str, int]
    origin: str


class Strangers:
    """Knows the connections of one ROUTER by their descriptors."""

    def __init__(self, limits: Limits, refused: Counter[str]) -> None:
        """`refused` counts by reason: "connections", "strangers" or "bytes"."""
        self._limits, self._refused = limits, refused
        self._looked = 0.0
        self._all: dict[int, _Connection] = {}
        self._unproved: dict[int, _Connection] = {}
        self._from: Counter[str] = Counter()  # connections by origin, and those of strangers
        self._strangers_from: Counter[str] = Counter()

    def turn(self) -> int | None:
        """Looks at those that have proved nothing, if it is time; in how many ms the next look is
        due, None while there are none.
        """
        self._look_after(LOOK_S)
        return int(1000 * LOOK_S) if self._unproved else None

    def came(self, descriptor: int) -> None:
        """ZeroMQ has accepted a connection."""
        self.went(descriptor)
        try:
            with _socket(descriptor) as end:
                peer = end.getpeername()[:2]
        except OSError:  # it has gone again
            return
        found = _Connection(peer, _origin(peer[0]))
        self._all[descriptor] = self._unproved[descriptor] = found
        self._from[found.origin] += 1
        self._strangers_from[found.origin] += 1
        if self._from[found.origin] > self._limits.from_one:
            self._shut(descriptor, "connections")
        elif self._too_many(found.origin):
            self._look_after(CROWDED_S * len(self._unproved))  # some may have proved a key
            if descriptor in self._unproved and self._too_many(found.origin):
                self._shut(descriptor, "strangers")

    def went(self, descriptor: int) -> None:
        """ZeroMQ has lost it."""
        connection = self._all.pop(descriptor, None)
        if connection is not None:
            _one_less(self._from, connection.origin)
            self._proved(descriptor)

    def _look_after(self, seconds: float) -> None:
        if self._unproved and time.monotonic() >= self._looked + seconds:
            self._looked = time.monotonic()
            self._look()

    def _look(self) -> None:
        """Finds out who has proved a key, and shuts who sends too much."""
        for descriptor, connection in list(self._unproved.items()):
            try:
                with _socket(descriptor) as end:
                    if end.getpeername()[:2] != connection.peer:
                        continue  # its end is about to be told
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            except OSError:
                continue
            received, sent, again = _INFO.unpack(info)
            if sent - again > BEFORE_PROOF:
                self._proved(descriptor)
            elif received > self._limits.bytes:
                self._shut(descriptor, "bytes")

    def _proved(self, descriptor: int) -> None:
        connection = self._unproved.pop(descriptor, None)
        if connection is not None:
            _one_less(self._strangers_from, connection.origin)

    def _too_many(self, origin: str) -> bool:
        limits = self._limits
        return (
            len(self._unproved) > limits.strangers
            or self._strangers_from[origin] > limits.strangers_from_one
        )

    def _shut(self, descriptor: int, why: str) -> None:
        connection = self._all[descriptor]
        self.went(descriptor)
        try:
            with _socket(descriptor) as end:
                if end.getpeername()[:2] == connection.peer:
                    end.shutdown(socket.SHUT_RDWR)
                    self._refused[why] += 1
        except OSError:  # it has gone by itself
            pass


def _socket(descriptor: int) -> socket.socket:
    """A socket of our own for ZeroMQ's: it stays the same one however soon that is closed. OSError:
    it has been, and by now perhaps a file has its number.
    """
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _origin(host: str) -> str:
    """The address that a peer is counted by: whoever has one of IPv6 has 2^64 of them."""
    found = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, 64), strict=False))
    return host


def _one_less(counter: Counter[str], origin: str) -> None:
    counter[origin] -= 1
    if not counter[origin]:
        del counter[origin]
