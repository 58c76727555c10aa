"""Registry of available deltas, and of the versions that hosts have reported.

New deltas are based on these versions only, so a sender's base advances by acknowledgements alone.
The registry is in memory: after a restart of the store, versions are sent in full until hosts
report again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from meshrl.common.api.transfer.deltas import (
    BeginDelta,
    ChunkDelta,
    DeltaBases,
    DeltaBatch,
    DeltaQuery,
    StageDelta,
    VersionAcknowledgement,
    VersionRef,
)
from meshrl.common.api.weights import Weights
from meshrl.common.base.errors import BadMessage, DeadlineExceeded
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.weights.retention.job_records import JobRecords
from meshrl.services.weights.retention.policy import VersionNumber

HOLDER_MAX_AGE_S = 3600.0  # for which a report counts: caches keep chunks as long
# Without a message of an active part: groups follow each other in fractions of a second.
SENDER_TIMEOUT_S = 30.0
MAX_BASES = 2  # of one version: each base means another encoding, for fewer hosts
MAX_WAIT_S = 10.0  # of a request; below the call's deadline
UNSWEPT_GRACE_S = 60.0  # for deltas of a version that no sweep has seen yet
MAX_PARTS = 4096  # processes that stage one version: more ranks than any training has


@dataclass
class VersionHolder:
    """Last report of a host: time, newest version, and newest anchor."""

    reported_at: float
    newest: VersionRef
    anchor: VersionRef | None = None


def choose_bases(holders: Iterable[VersionHolder], anchor_interval: int) -> list[VersionRef]:
    """Return the base versions that are worth making deltas from.

    They are the versions that most hosts have, the newest first among equals. For hosts behind the
    first one, the shared anchor counts rather than each host's own version.
    """
    there = list(holders)
    first = _find_most_common([holder.newest for holder in there])
    if first is None:
        return []
    behind = [holder for holder in there if holder.newest != first]
    shared = [holder.anchor or holder.newest for holder in behind] if anchor_interval else []
    found = [first]
    while len(found) < MAX_BASES and (
        more := _find_most_common([b for b in shared if b not in found])
    ):
        found.append(more)
    return found


def _find_most_common(versions: list[VersionRef]) -> VersionRef | None:
    def rank(base: VersionRef) -> tuple[int, int, int, str]:
        return versions.count(base), base.lineage, base.version, base.manifest

    return max(versions, key=rank, default=None)


@dataclass
class _TargetDeltas:
    job: str
    started_at: float
    active_parts: dict[int, float]  # time of the last message by active part
    bases: list[VersionRef]
    chunks: list[ChunkDelta] = field(default_factory=list)
    known_pairs: set[tuple[str, str]] = field(default_factory=set)  # (old, new)
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_waiters(self) -> None:
        self.wakeup.set()
        self.wakeup = asyncio.Event()

    def has_more(self, now: float) -> bool:
        return any(now - heard < SENDER_TIMEOUT_S for heard in self.active_parts.values())


class DeltaRegistry:
    """Registry of deltas, one per store."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._holders: dict[str, dict[str, VersionHolder]] = {}  # by job and host
        self._anchor_intervals: dict[str, int] = {}  # in versions, by job
        self._deltas_by_target: dict[str, _TargetDeltas] = {}  # by manifest of the target

    def acknowledge_version(self, acknowledgement: VersionAcknowledgement) -> None:
        """Record a host's version; a report of an older version does not remove newer ones."""
        hosts = self._holders.setdefault(acknowledgement.job, {})
        holder, anchors = hosts.get(acknowledgement.host), list[VersionRef]()
        candidates = [acknowledgement.target, *([holder.newest] if holder else [])]
        if (
            every := self._anchor_intervals.get(acknowledgement.job, 0)
        ) and acknowledgement.target.version % every == 0:
            anchors.append(acknowledgement.target)
        if holder and holder.anchor:
            anchors.append(holder.anchor)

        def age(base: VersionRef) -> tuple[int, int]:
            return base.lineage, base.version

        newest, anchor = max(candidates, key=age), max(anchors, key=age, default=None)
        hosts[acknowledgement.host] = VersionHolder(self._mesh.clock.monotonic(), newest, anchor)

    def begin_deltas(self, request: BeginDelta) -> list[VersionRef]:
        """Return the base versions of deltas to a new version.

        Until its parts are complete, requests for the version's deltas are answered with
        `has_more`.
        """
        now, target = self._mesh.clock.monotonic(), request.target
        self._anchor_intervals[request.job] = request.anchor_interval
        found = self._deltas_by_target.get(target.manifest)
        if found is None:
            self._stop_earlier_targets(request.job)
            holders = self._list_holders(request.job, now)
            # with several parts, each host has only some of the chunks
            own = request.host if request.parts == 1 else ""
            others = [holder for host, holder in holders.items() if host != own]
            bases = [b for b in choose_bases(others, request.anchor_interval) if b != target]
            if not bases:
                return []
            found = _TargetDeltas(request.job, now, dict.fromkeys(range(request.parts), now), bases)
            self._deltas_by_target[target.manifest] = found
        return found.bases

    def stage_deltas(self, request: StageDelta) -> bool:
        found = self._deltas_by_target.get(request.deltas.target.manifest)
        if found is None or request.part not in found.active_parts:
            return False
        for chunk in request.deltas.chunks:
            if (chunk.old_chunk, chunk.new_chunk) not in found.known_pairs:
                found.known_pairs.add((chunk.old_chunk, chunk.new_chunk))
                found.chunks.append(chunk)
        if request.is_last:
            del found.active_parts[request.part]
        else:
            found.active_parts[request.part] = self._mesh.clock.monotonic()
        found.wake_waiters()
        return True

    async def fetch_deltas(self, request: DeltaQuery) -> DeltaBatch:
        """Return the deltas to a version after `offset`, waiting for some or for the end."""
        until = self._mesh.clock.monotonic() + min(request.wait_s, MAX_WAIT_S)
        while found := self._deltas_by_target.get(request.target):
            now = self._mesh.clock.monotonic()
            chunks = found.chunks[request.offset :]
            holder = self._holders.get(found.job, {}).get(request.host)
            of_use = holder and (holder.newest in found.bases or holder.anchor in found.bases)
            more = found.has_more(now) and bool(of_use)
            if chunks or not more or now >= until:
                return DeltaBatch(chunks, more)
            with suppress(DeadlineExceeded):
                async with self._mesh.clock.timeout(until - now, "waiting for deltas to a version"):
                    await found.wakeup.wait()
        return DeltaBatch()

    def retain_live(self, live_manifests: set[str]) -> set[str]:
        """Return the blobs of deltas to live versions, and forget other deltas."""
        now = self._mesh.clock.monotonic()
        self._deltas_by_target = {
            target: one
            for target, one in self._deltas_by_target.items()
            if target in live_manifests or now - one.started_at < UNSWEPT_GRACE_S
        }
        return {chunk.blob for one in self._deltas_by_target.values() for chunk in one.chunks}

    def list_anchors(self) -> set[str]:
        """Return the manifests of anchors that hosts have: hosts with older versions catch up from
        them.
        """
        now = self._mesh.clock.monotonic()
        return {
            holder.anchor.manifest
            for job in self._holders
            for holder in self._list_holders(job, now).values()
            if holder.anchor is not None
        }

    def forget_job(self, job: str) -> None:
        self._holders.pop(job, None)
        self._anchor_intervals.pop(job, None)
        self._stop_earlier_targets(job)

    def stats(self) -> dict[str, int]:
        """Return the numbers of versions with deltas, of their chunks, and of the deltas' bytes."""
        chunks = [chunk for one in self._deltas_by_target.values() for chunk in one.chunks]
        return {
            "delta_versions": len(self._deltas_by_target),
            "delta_chunks": len(chunks),
            "delta_bytes": sum(chunk.size_bytes for chunk in chunks),
        }

    def _list_holders(self, job: str, now: float) -> dict[str, VersionHolder]:
        hosts = self._holders.get(job, {})
        for host in [
            host for host, holder in hosts.items() if now - holder.reported_at > HOLDER_MAX_AGE_S
        ]:
            del hosts[host]
        return hosts

    def _stop_earlier_targets(self, job: str) -> None:
        """End earlier targets of the job: their senders make newer deltas now."""
        for one in self._deltas_by_target.values():
            if one.job == job and one.active_parts:
                one.active_parts.clear()
                one.wake_waiters()


class DeltaActor(Actor):
    """Delta calls of the store."""

    mesh: Mesh
    delta_registry: DeltaRegistry
    job_records: JobRecords

    @call(Weights.begin_deltas)
    def begin_deltas(self, request: BeginDelta) -> DeltaBases:
        """Return the bases of deltas to a new version; none for a job without record.

        BadMessage: the part number or the anchor interval is invalid.
        """
        if not 0 <= request.part < request.parts <= MAX_PARTS or request.anchor_interval < 0:
            raise BadMessage(
                f"invalid delta: part {request.part}, {request.parts} parts, anchor interval "
                f"{request.anchor_interval}; at most {MAX_PARTS} parts are numbered from 0",
                where=self.mesh.name,
                fix="Use the same version of MeshRL on all hosts",
            )
        known = any(record.job == request.job and record.versions for record in self.job_records)
        return DeltaBases(self.delta_registry.begin_deltas(request) if known else [])

    @call(Weights.stage_deltas)
    def stage_deltas(self, request: StageDelta) -> bool:
        return self.delta_registry.stage_deltas(request)

    @call(Weights.fetch_deltas)
    async def fetch_deltas(self, request: DeltaQuery) -> DeltaBatch:
        return await self.delta_registry.fetch_deltas(request)

    @call(Weights.acknowledge_version)
    def acknowledge_version(self, request: VersionAcknowledgement) -> None:
        """Acknowledge a version on record; one that was deleted since is no base."""
        number = VersionNumber(request.target.lineage, request.target.version)
        if any(
            record.job == request.job and record.versions.get(request.target.manifest) == number
            for record in self.job_records
        ):
            self.delta_registry.acknowledge_version(request)
