"""The deltas that there are, and what hosts have told that they hold, from which later ones are
made.

All of it is in memory only: after a restart of the store versions go in full until hosts tell
again. A sender's base moves on by what receivers have acknowledged, and by nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from meshrl.common.api.transfer.deltas import (
    AskDeltas,
    Base,
    BeginDelta,
    ChunkDelta,
    DeltaBases,
    Deltas,
    Received,
    StageDelta,
)
from meshrl.common.api.weights import Weights
from meshrl.common.base.errors import BadMessage, DeadlineExceeded
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.weights.keeping.records import JobRecords
from meshrl.services.weights.keeping.retention import Number

HELD_S = 3600.0  # that a host counts as holding what it told of: so long its cache keeps chunks
# Without news of a part that goes on: chunks follow each other in fractions of a second.
SILENT_S = 30.0
MOST_BASES = 2  # of one version: each more is encoded once more, for hosts that are fewer
LONGEST_WAIT_S = 10.0  # of a question; below the call's deadline
FRESH_S = 60.0  # that deltas stay although no sweep has seen their version yet
MOST_PARTS = 4096  # processes that stage one version: more ranks than anybody trains on


@dataclass
class VersionHolder:
    """What a host has told of, last: when, a version, and an anchor."""

    at: float
    newest: Base
    anchor: Base | None = None


def bases(holders: Iterable[VersionHolder], anchors: int) -> list[Base]:
    """From which versions deltas are worth making: those that most hosts hold, newest of the most
    first; for hosts behind the first one, the anchor that they share rather than what each holds.
    """
    there = list(holders)
    first = _commonest([holder.newest for holder in there])
    if first is None:
        return []
    behind = [holder for holder in there if holder.newest != first]
    shared = [holder.anchor or holder.newest for holder in behind] if anchors else []
    found = [first]
    while len(found) < MOST_BASES and (more := _commonest([b for b in shared if b not in found])):
        found.append(more)
    return found


def _commonest(held: list[Base]) -> Base | None:
    def rank(base: Base) -> tuple[int, int, int, str]:
        return held.count(base), base.lineage, base.version, base.digest

    return max(held, key=rank, default=None)


@dataclass
class _ToOne:
    job: str
    since: float
    parts: dict[int, float]  # that go on, and when each was last heard of
    bases: list[Base]
    chunks: list[ChunkDelta] = field(default_factory=list)
    known: set[tuple[str, str]] = field(default_factory=set)  # (old, new) of them
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def more(self, now: float) -> bool:
        return any(now - heard < SILENT_S for heard in self.parts.values())


class DeltaSets:
    """One in the store."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._holders: dict[str, dict[str, VersionHolder]] = {}  # by job and host
        self._anchors: dict[str, int] = {}  # each so manieth version of a job is one
        self._sets: dict[str, _ToOne] = {}  # by the target's manifest

    def received(self, told: Received) -> None:
        """Notes what a host holds; who reads an older version has not lost the newer ones."""
        hosts = self._holders.setdefault(told.job, {})
        holder, anchors = hosts.get(told.host), list[Base]()
        held = [told.target, *([holder.newest] if holder else [])]
        if (every := self._anchors.get(told.job, 0)) and told.target.version % every == 0:
            anchors.append(told.target)
        if holder and holder.anchor:
            anchors.append(holder.anchor)

        def age(base: Base) -> tuple[int, int]:
            return base.lineage, base.version

        newest, anchor = max(held, key=age), max(anchors, key=age, default=None)
        hosts[told.host] = VersionHolder(self._mesh.clock.monotonic(), newest, anchor)

    def begin(self, asked: BeginDelta) -> list[Base]:
        """From which versions deltas to a new one are wanted. Until its parts are at their end, who
        asks for the version's deltas is told that more may follow.
        """
        now, target = self._mesh.clock.monotonic(), asked.target
        self._anchors[asked.job] = asked.anchors
        found = self._sets.get(target.digest)
        if found is None:
            self._supersede(asked.job)
            held = self._held(asked.job, now)
            own = asked.host if asked.parts == 1 else ""  # of several each has some of the chunks
            others = [holder for host, holder in held.items() if host != own]
            wanted = [b for b in bases(others, asked.anchors) if b != target]
            if not wanted:
                return []
            found = _ToOne(asked.job, now, dict.fromkeys(range(asked.parts), now), wanted)
            self._sets[target.digest] = found
        return found.bases

    def stage(self, told: StageDelta) -> bool:
        found = self._sets.get(told.deltas.target.digest)
        if found is None or told.part not in found.parts:
            return False
        for chunk in told.deltas.chunks:
            if (chunk.old, chunk.new) not in found.known:
                found.known.add((chunk.old, chunk.new))
                found.chunks.append(chunk)
        if told.whole:
            del found.parts[told.part]
        else:
            found.parts[told.part] = self._mesh.clock.monotonic()
        found.changed()
        return True

    async def to(self, asked: AskDeltas) -> Deltas:
        """The deltas to a version beyond those that are known, once there are some, or none will
        come.
        """
        until = self._mesh.clock.monotonic() + min(asked.wait_s, LONGEST_WAIT_S)
        while found := self._sets.get(asked.target):
            now = self._mesh.clock.monotonic()
            chunks = found.chunks[asked.after :]
            holder = self._holders.get(found.job, {}).get(asked.host)
            of_use = holder and (holder.newest in found.bases or holder.anchor in found.bases)
            more = found.more(now) and bool(of_use)
            if chunks or not more or now >= until:
                return Deltas(chunks, more)
            with suppress(DeadlineExceeded):
                async with self._mesh.clock.timeout(until - now, "deltas to a version"):
                    await found.news.wait()
        return Deltas()

    def beside(self, live: set[str]) -> set[str]:
        """The blobs of deltas to versions that live; deltas to others are forgotten."""
        now = self._mesh.clock.monotonic()
        self._sets = {
            target: one
            for target, one in self._sets.items()
            if target in live or now - one.since < FRESH_S
        }
        return {chunk.blob for one in self._sets.values() for chunk in one.chunks}

    def anchored(self) -> set[str]:
        """Manifests of the anchors that some host holds: hosts behind the others catch up from
        there.
        """
        now = self._mesh.clock.monotonic()
        return {
            holder.anchor.digest
            for job in self._holders
            for holder in self._held(job, now).values()
            if holder.anchor is not None
        }

    def forget(self, job: str) -> None:
        self._holders.pop(job, None)
        self._anchors.pop(job, None)
        self._supersede(job)

    def stats(self) -> dict[str, int]:
        """Versions with deltas, and the chunks and bytes of these."""
        chunks = [chunk for one in self._sets.values() for chunk in one.chunks]
        return {
            "delta_versions": len(self._sets),
            "delta_chunks": len(chunks),
            "delta_bytes": sum(chunk.size for chunk in chunks),
        }

    def _held(self, job: str, now: float) -> dict[str, VersionHolder]:
        hosts = self._holders.get(job, {})
        for host in [host for host, holder in hosts.items() if now - holder.at > HELD_S]:
            del hosts[host]
        return hosts

    def _supersede(self, job: str) -> None:
        """Nobody waits for more deltas to earlier versions: those who make them make newer ones."""
        for one in self._sets.values():
            if one.job == job and one.parts:
                one.parts.clear()
                one.changed()


class WithDeltas(Actor):
    """What the store answers of deltas."""

    mesh: Mesh
    deltas: DeltaSets
    records: JobRecords

    @call(Weights.begin_delta)
    def begin_delta(self, request: BeginDelta) -> DeltaBases:
        """BadMessage for a part that there cannot be. Of a job of which nothing is on record nobody
        holds anything, and nothing is noted.
        """
        if not 0 <= request.part < request.parts <= MOST_PARTS or request.anchors < 0:
            raise BadMessage(
                f"part {request.part} of {request.parts} of a delta, anchors each "
                f"{request.anchors}: at most {MOST_PARTS} parts are counted, from 0 on",
                where=self.mesh.name,
                fix="Use the same MeshRL everywhere",
            )
        known = any(record.job == request.job and record.versions for record in self.records)
        return DeltaBases(self.deltas.begin(request) if known else [])

    @call(Weights.stage_delta)
    def stage_delta(self, request: StageDelta) -> bool:
        return self.deltas.stage(request)

    @call(Weights.deltas)
    async def deltas_to(self, request: AskDeltas) -> Deltas:
        return await self.deltas.to(request)

    @call(Weights.received)
    def received(self, request: Received) -> None:
        """What is not on record is no base of anything: it may have been collected meanwhile."""
        number = Number(request.target.lineage, request.target.version)
        if any(
            record.job == request.job and record.versions.get(request.target.digest) == number
            for record in self.records
        ):
            self.deltas.received(request)
