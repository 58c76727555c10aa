"""The simulated network, a transport with latency, loss, repetition, partitions and stopped
processes.

Everything it does wrong is drawn from one seed, so a failing run can be run again.
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
from meshrl.common.mesh.transport.base import Deliver, Frames, Gone, Lost, Peer

PARKED = 10_000  # messages that a stopped process may have waiting
NOTICE_S = 0.001  # until a live host reports that nobody listens at an address


@dataclass
class Faults:
    """What the network does to messages: shares of them, and seconds."""

    latency_s: float = 0.001
    jitter_s: float = 0.0005
    loss: float = 0.0
    duplication: float = 0.0
    reorder: float = 0.0
    reorder_s: float = 0.05


class MemoryNetwork:
    def __init__(self, clock: Clock, random: Random, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.lost = self.duplicated = 0
        self.delivered: Callable[[str, str, list[Frame]], None] | None = None  # told of each
        self._clock = clock
        self._random = random
        self._context = Context()
        self._ends: dict[str, MemoryTransport] = {}
        self.roles: dict[str, str] = {}  # what whoever sends from an address is known to be
        self._cut: set[frozenset[str]] = set()
        self._paused: dict[str, deque[tuple[str, Peer, list[Frame]]]] = {}
        self._unsent: dict[str, deque[tuple[str, Peer, Frames]]] = {}
        self._last: dict[tuple[str, str], float] = {}  # arrival times: without `reorder`, in order

    # ------------------------------------------------------------ faults

    def partition(self, a: str, b: str) -> None:
        """Messages between the two addresses vanish until `heal`; nobody is told."""
        self._cut.add(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        self._cut.discard(frozenset((a, b)))

    def mend(self) -> None:
        self._cut.clear()

    @property
    def addresses(self) -> list[str]:
        return list(self._ends)

    def pause(self, address: str) -> None:
        """A process under SIGSTOP: what it is sent waits, what it sends waits."""
        self._paused.setdefault(address, deque())
        self._unsent.setdefault(address, deque())

    def resume(self, address: str) -> None:
        for target, peer, out in self._unsent.pop(address, ()):
            self.carry(address, target, peer, out)
        for sender, peer, frames in self._paused.pop(address, ()):
            self._arrive(sender, address, peer, frames)

    # ------------------------------------------------------------ traffic

    def attach(self, end: MemoryTransport) -> None:
        self._ends[end.address] = end

    def detach(self, end: MemoryTransport) -> None:
        """The process at this address has ended: those connected to it are told."""
        if self._ends.get(end.address) is end:
            del self._ends[end.address]
            self._paused.pop(end.address, None)
            self._unsent.pop(end.address, None)
            for other in list(self._ends.values()):
                other.hear_end(end.address, NOTICE_S)

    def carry(self, source: str, target: str, peer: Peer, frames: Frames) -> None:
        """Takes a message at `source`; delivers it at `target`, perhaps, once or twice."""
        held_back = self._unsent.get(source)
        if held_back is not None:
            held_back.append((target, peer, frames))
            return
        end = self._ends.get(source)
        if target not in self._ends:
            if end is not None:
                end.hear_end(target, NOTICE_S)
            return
        if end is not None:
            end.reached.add(target)
        draw, faults = self._random.random, self.faults
        if frozenset((source, target)) in self._cut or draw() < faults.loss:
            self.lost += 1
            return
        twice = draw() < faults.duplication
        self.duplicated += twice
        held = [bytes(frame) for frame in frames]  # the sender may reuse its arrays
        for _ in range(1 + twice):
            self._schedule(source, target, peer, held)

    def _schedule(self, source: str, target: str, peer: Peer, frames: list[bytes]) -> None:
        draw, faults = self._random.random, self.faults
        now = self._clock.monotonic()
        at = now + faults.latency_s + draw() * faults.jitter_s
        if draw() < faults.reorder:
            at += draw() * faults.reorder_s
        else:
            at = self._last[source, target] = max(at, self._last.get((source, target), 0.0))
        loop, content = asyncio.get_running_loop(), list[Frame](frames)
        # In nobody's context: what arrives is nothing that its sender does.
        loop.call_later(
            at - now, self._arrive, source, target, peer, content, context=self._context
        )

    def _arrive(self, source: str, target: str, peer: Peer, frames: list[Frame]) -> None:
        waiting = self._paused.get(target)
        if waiting is not None:
            if len(waiting) < PARKED:
                waiting.append((source, peer, frames))
            return
        end = self._ends.get(target)
        if end is not None:
            if self.delivered is not None:
                self.delivered(source, target, frames)
            end.context.run(end.take, peer, frames)


class MemoryTransport:
    """One process's end of a MemoryNetwork. Its address is any text that is free."""

    def __init__(self, network: MemoryNetwork, address: str, role: str = "") -> None:
        self.address = address
        network.roles[address] = role  # for good: what it has sent may arrive after its end
        self.context = copy_context()  # of the process that it belongs to
        self._network = network
        self._known: set[str] = set()  # whom we have sent requests to
        self._peers: set[str] = set()  # who has sent us requests
        self.reached: set[str] = set()  # whom something may have arrived at
        self._closed = False
        self._deliver: Deliver | None = None
        network.attach(self)

    @property
    def refused(self) -> dict[str, int]:
        return {}

    def start(self, deliver: Deliver, lost: Lost, gone: Gone) -> None:
        self._deliver, self._lost, self._gone = deliver, lost, gone

    def send(self, address: str, frames: Frames) -> None:
        if self._closed:
            raise Overloaded("this transport is closed", where=self.address)
        self._known.add(address)
        self._network.carry(self.address, address, self.address.encode(), frames)

    def reply(self, peer: Peer, frames: Frames) -> None:
        if not self._closed:
            self._network.carry(self.address, peer.decode(), b"", frames)

    def take(self, peer: Peer, frames: list[Frame]) -> None:
        if self._deliver is not None and not self._closed:
            if peer:
                self._peers.add(peer.decode())
            self._deliver(peer, frames, self._network.roles[peer.decode()] if peer else "")

    def hear_end(self, address: str, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(after_s, self._ended, address, context=self.context)

    def _ended(self, address: str) -> None:
        if self._closed or self._deliver is None:
            return
        if address in self._known:
            reached = address in self.reached
            self.forget(address)
            self._lost(address, reached, False)
        if address in self._peers:
            self._peers.discard(address)
            self._gone(address.encode())

    def owner(self, peer: Peer) -> Peer:
        """The peer itself: nobody has keys."""
        return peer

    def forget(self, address: str) -> None:
        self._known.discard(address)
        self.reached.discard(address)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.detach(self)
