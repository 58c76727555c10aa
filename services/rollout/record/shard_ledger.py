"""Ledger of one job on one shard: the segments recorded in Redis, and recovery of a predecessor's
segments, including corrupt ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.base.errors import CorruptData, StorageFull
from meshrl.common.base.files import corruption
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.records.ledger import (
    HEADER,
    MAX_RECORD_BYTES,
    Ledger,
    LedgerRecord,
    RecordKind,
    extract_groups,
    iter_records_with_offsets,
    list_segments,
)
from meshrl.common.records.token_records import MEMBER_BITS, TokenRows, select_rows, split_by_size
from meshrl.common.state import events
from meshrl.common.state import groups as rows
from meshrl.common.state.pool.workers.process_names import parse_service_name
from meshrl.services.rollout.trajectories.trajectory import RestoredGroups, Trajectory

SYNC_INTERVAL_S = 0.05  # possible loss by a host crash (`fsync_ms`)
FULL_RETRY_S = 0.5
# limit of a token record, which grows while the disk is full
MAX_PART_BYTES = MAX_RECORD_BYTES // 2
WRITE_TIMEOUT_S = 60.0  # after this time a disk counts as failed

RUN_HOST = "run_host"  # word of Redis scripts: segments lie on the run host
HOST_LOST = "host_lost"  # reason of a requeue: the ledger is on another host
MAX_NAMED_GROUPS = 20  # groups named in an event
REWRITE_BATCH = 256  # records rewritten at a time

WrittenFuture = asyncio.Future[None]
ComputeSeed = Callable[[int, int], int]


@dataclass
class _LedgerSegment:
    """Segment of a predecessor, or one recorded in Redis."""

    path: Path
    sealed_length: int
    readable_length: int = 0  # of its complete records, with the header
    groups: set[int] = field(default_factory=set)
    corruption: str = ""

    def replay(self, restored: RestoredGroups, compute_seed: ComputeSeed) -> None:
        """Replay its complete records; of a corrupt segment those before the corruption."""
        try:
            for record, end in iter_records_with_offsets(self.path, self.sealed_length):
                self.readable_length = end
                restored.apply_record(record, compute_seed)
                self.groups |= extract_groups(record)
        except CorruptData as error:
            self.corruption = error.message
            restored.mark_gap()

    @property
    def is_unstarted(self) -> bool:
        """True if it is recorded as open but has no complete header, as after a crash before the
        first write.
        """
        short = not self.path.exists() or self.path.stat().st_size < len(HEADER)
        return self.sealed_length < 0 and short and not self.corruption


def _list_surviving(
    ledger_segments: Sequence[_LedgerSegment], groups: set[int]
) -> Iterator[LedgerRecord]:
    again = RestoredGroups()
    for one in ledger_segments:
        for record, _ in (
            iter_records_with_offsets(one.path, one.readable_length) if one.readable_length else ()
        ):
            counted = again.filter_record(record)
            again.apply_record(record, lambda group, member: 0)
            if counted is None or counted.kind is RecordKind.CLOSE:
                continue
            if counted.kind is RecordKind.TOKENS:
                rows = counted.payload
                chosen = np.isin(rows.trajectory_ids >> MEMBER_BITS, list(groups))
                if chosen.any():
                    yield LedgerRecord(RecordKind.TOKENS, select_rows(rows, chosen))
            elif extract_groups(counted) <= groups:
                yield counted
        if one.corruption:
            again.mark_gap()


def _describe_recovery(restarted: set[int], cut: set[int]) -> str:
    parts = []
    if restarted:
        parts.append(f"{_format_groups(restarted)} from the prompt")
    if cut:
        parts.append(f"{_format_groups(cut)} from the records before the corruption")
    return f"continued: {', '.join(parts)}" if parts else "no open group needs it"


def _format_groups(groups: set[int]) -> str:
    first = ", ".join(map(str, sorted(groups)[:MAX_NAMED_GROUPS]))
    more = f" and {len(groups) - MAX_NAMED_GROUPS} more" if len(groups) > MAX_NAMED_GROUPS else ""
    return f"group{'s' * (len(groups) > 1)} {first}{more}"


class ShardLedger:
    """Ledger that writes records before they count. Redis records each segment and its sealed
    length.
    """

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._mesh, self._job, self._run_directory = mesh, job.id, job.local_run_dir
        # Identifies the storage of the segments, equal for all processes that can read them.
        self._place = RUN_HOST if job.is_on_run_host else f"host {mesh.settings.host}"
        self.directory = job.local_run_dir / "ledger" / f"shard-{parse_service_name(mesh.name)[2]}"
        self._ledger = Ledger(mesh.host, self.directory, f"{mesh.token:012d}")
        self._queue: list[
            tuple[tuple[tuple[RecordKind, Any], ...], Iterable[int], WrittenFuture]
        ] = []
        self._writer: asyncio.Task[None] | None = None
        self._write_in_progress: WrittenFuture | None = None
        self._segment_lock = asyncio.Lock()  # held while the open segment must not change
        self._changed = asyncio.Event()  # there may be records to write or to sync
        self._changed.set()

    @property
    def bytes_written(self) -> int:
        return self._ledger.bytes_written

    async def take_over(self, compute_seed: ComputeSeed) -> dict[int, list[Trajectory]]:
        """Claim the shard, and return the recovered trajectories of the open groups.

        A predecessor's segments are first sealed at their last complete record, so later writes of
        the predecessor are ignored. Records before a corruption count. They are written again,
        since the corrupt segment is quarantined. Groups without any record start again.
        """
        mesh, job = self._mesh, self._job
        on_record = await rows.claim_shard(mesh.state, job, mesh.name, mesh.token)
        before = await rows.read_ledger_location(mesh.state, job, mesh.name)
        if before not in ("", self._place):
            await self._abandon_open_groups(before, on_record)
            on_record = {}
        await rows.record_ledger_location(mesh.state, job, mesh.name, mesh.token, self._place)
        restored = RestoredGroups()
        mentioned: set[int] = set()
        found: list[_LedgerSegment] = []
        local_names = {path.name for path in list_segments(self.directory)}
        for name in sorted(local_names | on_record.keys()):
            one = _LedgerSegment(self.directory / name, on_record.get(name, -1))
            found.append(one)
            one.replay(restored, compute_seed)
            mentioned |= one.groups
        open_now = {a.group for a in await rows.read_open_groups(mesh.state, job, mesh.name)}
        for one in found:
            if one.is_unstarted and open_now - mentioned:
                one.corruption = "the file is missing or empty"
            if not one.corruption:
                await self._adopt_segment(one)
        await self._start_segment()
        open_groups = restored.list_open_groups()
        if any(one.corruption for one in found):
            await self._rewrite_surviving(found, restored, open_now)
        for group in open_groups.keys() - open_now:
            await self.write_records((RecordKind.CLOSE, [group, "ended"]))
        for group in mentioned - open_now:
            await self.forget_group(group)
        return open_groups

    async def _abandon_open_groups(self, old_place: str, on_record: Iterable[str]) -> None:
        """Requeue the open groups of a predecessor whose ledger is on another host, possibly
        lost.
        """
        mesh, job, token = self._mesh, self._job, self._mesh.token
        lost = await rows.read_open_groups(mesh.state, job, mesh.name)
        mesh.telemetry.log.warning(
            "the ledger is on another host, and its groups are requeued",
            ledger=old_place,
            groups=len(lost),
        )
        for a in lost:
            op = f"anew.{token}.{a.group}"
            await rows.requeue_lost_group(mesh.state, job, mesh.name, token, a.group, HOST_LOST, op)
        for name in on_record:
            await rows.remove_segment(mesh.state, job, mesh.name, token, name)
        # of an earlier incarnation of the shard on this host
        for path in list_segments(self.directory):
            path.unlink(missing_ok=True)

    async def _adopt_segment(self, segment: _LedgerSegment) -> None:
        mesh, job, name = self._mesh, self._job, segment.path.name
        if not segment.path.exists():
            return await rows.remove_segment(mesh.state, job, mesh.name, mesh.token, name)
        if segment.sealed_length < 0:
            await rows.record_segment(
                mesh.state, job, mesh.name, mesh.token, name, segment.readable_length
            )
        self._ledger.adopt_segment(segment.path, segment.groups)

    async def _rewrite_surviving(
        self,
        ledger_segments: Sequence[_LedgerSegment],
        restored: RestoredGroups,
        open_now: set[int],
    ) -> None:
        """Rewrite the records of open groups in the new segment, each trajectory from its start,
        then quarantine corrupt segments.
        """
        batch: list[tuple[RecordKind, Any]] = []
        for record in _list_surviving(ledger_segments, open_now):
            batch.append((record.kind, record.payload))
            if len(batch) == REWRITE_BATCH:
                await self.write_records(*batch, groups=open_now)
                batch = []
        await self.write_records(*batch, groups=open_now)
        await self._mesh.host.run_blocking(self._ledger.sync, deadline_s=WRITE_TIMEOUT_S)
        cut = {
            t.group for key, t in restored.trajectories.items() if key in restored.cut_trajectories
        }
        for one in ledger_segments:
            if one.corruption:
                then = _describe_recovery(
                    open_now - restored.list_open_groups().keys(), cut & open_now
                )
                await self._quarantine_segment(one, then)

    async def _quarantine_segment(self, segment: _LedgerSegment, recovery: str) -> None:
        mesh, path = self._mesh, segment.path
        quarantined_path = (
            corruption.quarantine(path, self._run_directory) if path.exists() else None
        )
        fields = corruption.make_event_fields(
            "ledger",
            path,
            segment.corruption,
            recovery,
            job=self._job,
            quarantined_path=quarantined_path,
        )
        mesh.telemetry.log.error("damaged", **fields)
        await retry(
            mesh.clock, lambda: events.append(mesh.state, corruption.CORRUPTION_EVENT, fields)
        )
        await rows.remove_segment(mesh.state, self._job, mesh.name, mesh.token, path.name)

    async def _start_segment(self) -> None:
        """Start a new segment, recorded before its first byte."""
        mesh, job = self._mesh, self._job
        name = self._ledger.next_segment_path.name
        await rows.record_segment(mesh.state, job, mesh.name, mesh.token, name, -1)
        async with self._segment_lock:
            await mesh.host.run_blocking(self._ledger.sync, deadline_s=WRITE_TIMEOUT_S)
            sealed = self._ledger.open_next_segment()
        if sealed is not None:
            path, length = sealed
            await rows.record_segment(mesh.state, job, mesh.name, mesh.token, path.name, length)

    async def forget_group(self, group: int) -> None:
        """Forget an ended group: delete and unregister segments that are no longer needed."""
        mesh = self._mesh
        for path in self._ledger.forget_group(group):
            await rows.remove_segment(mesh.state, self._job, mesh.name, mesh.token, path.name)
            # after that: a recorded segment without a file counts as corrupt
            path.unlink(missing_ok=True)

    def defer_record(self, kind: RecordKind, payload: Any, group: int) -> None:
        self._ledger.defer(kind, payload, group)
        self._changed.set()

    async def write_records(
        self, *records: tuple[RecordKind, Any], groups: Iterable[int] = ()
    ) -> None:
        """Write records; a full disk blocks the trajectory, without loss.

        Records logged during a write are part of the next write.
        """
        done: WrittenFuture = asyncio.get_running_loop().create_future()
        self._queue.append((records, groups, done))
        if records:
            self._changed.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_queue(), name="ledger")
        await done

    async def _write_queue(self) -> None:
        try:
            while self._queue:
                queue, self._queue = self._queue, []
                records = [record for logged, _, _ in queue for record in logged]
                groups = {group for _, group_ids, _ in queue for group in group_ids}
                async with self._segment_lock:
                    await self._write(self._ledger.encode_block(records, groups))
                for _, _, done in queue:
                    if not done.done():
                        done.set_result(None)
        except (
            Exception
        ) as error:  # records of a failed write, possibly written, must not be written again
            self._mesh.host.exit(
                70, f"{self._mesh.name} cannot write its ledger: {error!r}", error, self._job
            )
        finally:
            self._writer = None

    async def _write(self, block: bytes) -> None:
        """Write a block on a thread, as a write may wait for the disk."""
        try:
            return await self._write_once(block)
        except StorageFull as error:
            self._mesh.telemetry.log.error("ledger: disk full", error=str(error))
        with self._mesh.wait("room for the ledger", on="disk"):
            while True:
                await self._mesh.clock.sleep(FULL_RETRY_S)
                with contextlib.suppress(StorageFull):
                    return await self._write_once(block)

    async def _write_once(self, block: bytes) -> None:
        write = self._mesh.host.run_blocking(
            self._ledger.write_block, block, deadline_s=WRITE_TIMEOUT_S
        )
        self._write_in_progress = asyncio.ensure_future(write)
        await asyncio.shield(self._write_in_progress)

    async def write_tokens(self, new: TokenRows) -> None:
        groups = np.unique(new.trajectory_ids >> MEMBER_BITS).tolist()
        parts = ((RecordKind.TOKENS, part) for part in split_by_size(new, MAX_PART_BYTES))
        await self.write_records(*parts, groups=groups)

    async def sync_forever(self) -> None:
        """Sync written records to disk, and start a new segment when one is full. Sleep while
        nothing is written.
        """
        synced = -1
        while True:
            await self._changed.wait()
            await self._mesh.clock.sleep(SYNC_INTERVAL_S)
            self._changed.clear()
            await self.write_records()  # after all logged records, and with deferred ones
            if synced != self._ledger.bytes_written:
                synced = self._ledger.bytes_written
                await self._mesh.host.run_blocking(self._ledger.sync, deadline_s=WRITE_TIMEOUT_S)
            if self._ledger.is_segment_full:
                await retry(self._mesh.clock, self._start_segment)

    async def close(self) -> None:
        """Close the ledger after the write in progress."""
        if self._writer is not None:
            self._writer.cancel()
        if self._write_in_progress is not None:
            await asyncio.wait([self._write_in_progress])
        self._ledger.close()
