"""Simulated network: a transport with latency, loss, duplication, partitions and stopped processes.

All faults are drawn from one seed, so that a failing run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import Overloaded
from meshrl.common.base.random import Random
from meshrl.common.mesh.transport.base import (
    DeliverCallback,
    Frames,
    Peer,
    PeerLostCallback,
    RequesterGoneCallback,
)

MAX_PARKED_MESSAGES = 10_000  # maximum number of messages waiting for a stopped process
END_NOTICE_S = 0.001  # until a live host reports that an address has no listener


@dataclass
class NetworkFaults:
    """Faults of messages: probabilities, and seconds."""

    latency_s: float = 0.001
    jitter_s: float = 0.0005
    loss: float = 0.0
    duplication: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.05


class MemoryNetwork:
    def __init__(self, clock: Clock, random: Random, faults: NetworkFaults | None = None) -> None:
        self.faults = faults or NetworkFaults()
        self.lost_messages = self.duplicated_messages = 0
        self.on_delivery: Callable[[str, str, list[Frame]], None] | None = (
            None  # called with each delivery
        )
        self._clock = clock
        self._random = random
        self._context = Context()
        self._transports: dict[str, MemoryTransport] = {}
        self.roles: dict[str, str] = {}  # role of the sender at an address
        self._partitions: set[frozenset[str]] = set()
        self._held_arrivals: dict[str, deque[tuple[str, Peer, list[Frame]]]] = {}
        self._held_sends: dict[str, deque[tuple[str, Peer, Frames]]] = {}
        self._last_arrival_s: dict[
            tuple[str, str], float
        ] = {}  # last arrival times: in order without `reorder`

    # ------------------------------------------------------------ faults

    def partition(self, a: str, b: str) -> None:
        """Drop messages between the two addresses until `heal`, without a notice."""
        self._partitions.add(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        self._partitions.discard(frozenset((a, b)))

    def heal_all(self) -> None:
        self._partitions.clear()

    @property
    def addresses(self) -> list[str]:
        return list(self._transports)

    def pause(self, address: str) -> None:
        """Pause a process, as by SIGSTOP: its received and sent messages wait."""
        self._held_arrivals.setdefault(address, deque())
        self._held_sends.setdefault(address, deque())

    def resume(self, address: str) -> None:
        for target, peer, out in self._held_sends.pop(address, ()):
            self.send(address, target, peer, out)
        for sender, peer, frames in self._held_arrivals.pop(address, ()):
            self._deliver(sender, address, peer, frames)

    # ------------------------------------------------------------ traffic

    def attach(self, transport: MemoryTransport) -> None:
        self._transports[transport.address] = transport

    def detach(self, transport: MemoryTransport) -> None:
        """Detach an ended process, and notify the connected processes."""
        if self._transports.get(transport.address) is transport:
            del self._transports[transport.address]
            self._held_arrivals.pop(transport.address, None)
            self._held_sends.pop(transport.address, None)
            for other in list(self._transports.values()):
                other.notify_peer_end(transport.address, END_NOTICE_S)

    def send(self, source: str, target: str, peer: Peer, frames: Frames) -> None:
        """Send a message from `source` to `target`: deliver it never, once or twice."""
        held_back = self._held_sends.get(source)
        if held_back is not None:
            held_back.append((target, peer, frames))
            return
        end = self._transports.get(source)
        if target not in self._transports:
            if end is not None:
                end.notify_peer_end(target, END_NOTICE_S)
            return
        if end is not None:
            end.reached_addresses.add(target)
        draw, faults = self._random.random, self.faults
        if frozenset((source, target)) in self._partitions or draw() < faults.loss:
            self.lost_messages += 1
            return
        is_duplicated = draw() < faults.duplication
        self.duplicated_messages += is_duplicated
        copied_frames = [bytes(frame) for frame in frames]  # the sender may reuse its arrays
        for _ in range(1 + is_duplicated):
            self._schedule_delivery(source, target, peer, copied_frames)

    def _schedule_delivery(self, source: str, target: str, peer: Peer, frames: list[bytes]) -> None:
        draw, faults = self._random.random, self.faults
        now = self._clock.monotonic()
        at = now + faults.latency_s + draw() * faults.jitter_s
        if draw() < faults.reorder:
            at += draw() * faults.reorder_s
        else:
            at = self._last_arrival_s[source, target] = max(
                at, self._last_arrival_s.get((source, target), 0.0)
            )
        loop, content = asyncio.get_running_loop(), list[Frame](frames)
        # Without a process's context: a delivery is no action of its sender.
        loop.call_later(
            at - now, self._deliver, source, target, peer, content, context=self._context
        )

    def _deliver(self, source: str, target: str, peer: Peer, frames: list[Frame]) -> None:
        waiting = self._held_arrivals.get(target)
        if waiting is not None:
            if len(waiting) < MAX_PARKED_MESSAGES:
                waiting.append((source, peer, frames))
            return
        end = self._transports.get(target)
        if end is not None:
            if self.on_delivery is not None:
                self.on_delivery(source, target, frames)
            end.context.run(end.receive, peer, frames)


class MemoryTransport:
    """Endpoint of one process in a MemoryNetwork. Its address is any unused text."""

    def __init__(self, network: MemoryNetwork, address: str, role: str = "") -> None:
        self.address = address
        network.roles[address] = role  # permanent: messages may arrive after its end
        self.context = copy_context()  # of its process
        self._network = network
        self._requested_addresses: set[str] = set()  # targets of our requests
        self._requesters: set[str] = set()  # senders of requests to us
        self.reached_addresses: set[str] = set()  # addresses that may have received messages
        self._closed = False
        self._deliver: DeliverCallback | None = None
        network.attach(self)

    @property
    def rejected_connections(self) -> dict[str, int]:
        return {}

    def start(
        self,
        deliver: DeliverCallback,
        on_peer_lost: PeerLostCallback,
        on_requester_gone: RequesterGoneCallback,
    ) -> None:
        self._deliver, self._on_peer_lost, self._on_requester_gone = (
            deliver,
            on_peer_lost,
            on_requester_gone,
        )

    def send(self, address: str, frames: Frames) -> None:
        if self._closed:
            raise Overloaded("this transport is closed", where=self.address)
        self._requested_addresses.add(address)
        self._network.send(self.address, address, self.address.encode(), frames)

    def reply(self, peer: Peer, frames: Frames) -> None:
        if not self._closed:
            self._network.send(self.address, peer.decode(), b"", frames)

    def receive(self, peer: Peer, frames: list[Frame]) -> None:
        if self._deliver is not None and not self._closed:
            if peer:
                self._requesters.add(peer.decode())
            self._deliver(peer, frames, self._network.roles[peer.decode()] if peer else "")

    def notify_peer_end(self, address: str, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._handle_peer_end, address, context=self.context)

    def _handle_peer_end(self, address: str) -> None:
        if self._closed or self._deliver is None:
            return
        if address in self._requested_addresses:
            was_reached = address in self.reached_addresses
            self.disconnect(address)
            self._on_peer_lost(address, was_reached, False)
        if address in self._requesters:
            self._requesters.discard(address)
            self._on_requester_gone(address.encode())

    def find_owner(self, peer: Peer) -> Peer:
        """Return the peer itself, as there are no keys."""
        return peer

    def disconnect(self, address: str) -> None:
        self._requested_addresses.discard(address)
        self.reached_addresses.discard(address)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.detach(self)
