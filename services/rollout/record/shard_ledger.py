"""The ledger of one job on one shard: its segments, which Redis names, and what a predecessor
left, also of those that are damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.base.errors import Damaged, StorageFull
from meshrl.common.base.files import damage
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.records.ledger import (
    HEADER,
    MAX_RECORD,
    Kind,
    Ledger,
    Record,
    groups_of,
    scan,
    segments,
)
from meshrl.common.records.token_record import MEMBER_BITS, TokenRows, in_parts, some
from meshrl.common.state import events
from meshrl.common.state import groups as rows
from meshrl.common.state.pool.workers.names import service
from meshrl.services.rollout.trajectories.trajectory import Restored, Trajectory

SYNC_S = 0.05  # what a host crash may cost (`fsync_ms`)
FULL_RETRY_S = 0.5
PART_BYTES = MAX_RECORD // 2  # most in a record of tokens, which grows while the disk is full
WRITE_S = 60.0  # a disk that takes longer has failed

HOME = "home"  # a word of Redis' scripts: where segments lie that the head sees
HOST_LOST = "host_lost"  # why groups are given back whose ledger another host has
NAMED = 20  # groups that an event names
AGAIN = 256  # records that are written down again at a time

Written = asyncio.Future[None]
SeedOf = Callable[[int, int], int]


@dataclass
class _Found:
    """A segment that a predecessor left, or that Redis names."""

    path: Path
    sealed: int
    length: int = 0  # of its whole records, with the header
    groups: set[int] = field(default_factory=set)
    damage: str = ""

    def read(self, restored: Restored, seed_of: SeedOf) -> None:
        """Replays its whole records, those before the damage if it is damaged."""
        try:
            for record, end in scan(self.path, self.sealed):
                self.length = end
                restored.apply(record, seed_of)
                self.groups |= groups_of(record)
        except Damaged as error:
            self.damage = error.message
            restored.gap()

    @property
    def never_begun(self) -> bool:
        """Whether it is on record as open and has not even a header: a crash leaves that if it
        comes before anything was to be written.
        """
        short = not self.path.exists() or self.path.stat().st_size < len(HEADER)
        return self.sealed < 0 and short and not self.damage


def _counted(found: Sequence[_Found], groups: set[int]) -> Iterator[Record]:
    again = Restored()
    for one in found:
        for record, _ in scan(one.path, one.length) if one.length else ():
            counted = again.counted(record)
            again.apply(record, lambda group, member: 0)
            if counted is None or counted.kind is Kind.CLOSE:
                continue
            if counted.kind is Kind.TOKENS:
                rows = counted.payload
                chosen = np.isin(rows.ids >> MEMBER_BITS, list(groups))
                if chosen.any():
                    yield Record(Kind.TOKENS, some(rows, chosen))
            elif groups_of(counted) <= groups:
                yield counted
        if one.damage:
            again.gap()


def _then(again: set[int], cut: set[int]) -> str:
    told = []
    if again:
        told.append(f"{_named(again)} from the prompt")
    if cut:
        told.append(f"{_named(cut)} from what was read before the damage")
    return f"it goes on: {', '.join(told)}" if told else "no open group needs it"


def _named(groups: set[int]) -> str:
    first = ", ".join(map(str, sorted(groups)[:NAMED]))
    more = f" and {len(groups) - NAMED} more" if len(groups) > NAMED else ""
    return f"group{'s' * (len(groups) > 1)} {first}{more}"


class ShardLedger:
    """Writes records down before they count; Redis names each segment and where it is sealed."""

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._mesh, self._job, self._here = mesh, job.id, job.here
        # A name of where the segments lie, which all that see them have for it.
        self._place = HOME if job.at_home else f"host {mesh.settings.host}"
        self.directory = job.here / "ledger" / f"shard-{service(mesh.name)[2]}"
        self._ledger = Ledger(mesh.host, self.directory, f"{mesh.token:012d}")
        self._queue: list[tuple[tuple[tuple[Kind, Any], ...], Iterable[int], Written]] = []
        self._writer: asyncio.Task[None] | None = None
        self._under_way: Written | None = None
        self._writing = asyncio.Lock()  # held while the open segment must stay the same
        self._changed = asyncio.Event()  # there may be something to write or to sync
        self._changed.set()

    @property
    def bytes_written(self) -> int:
        return self._ledger.bytes_written

    async def take_over(self, seed_of: SeedOf) -> dict[int, list[Trajectory]]:
        """Claims the shard; what its predecessor left of the groups that are still open.

        A predecessor's segments are sealed at their last whole record first: what it may still
        write is not read. What a damaged one tells before the damage counts, and is written down
        again, since the segment is set aside; groups of which nothing is left start again.
        """
        mesh, job = self._mesh, self._job
        on_record = await rows.claim_shard(mesh.state, job, mesh.name, mesh.token)
        before = await rows.ledger_place(mesh.state, job, mesh.name)
        if before not in ("", self._place):
            await self._begin_anew(before, on_record)
            on_record = {}
        await rows.note_place(mesh.state, job, mesh.name, mesh.token, self._place)
        restored = Restored()
        mentioned: set[int] = set()
        found: list[_Found] = []
        here = {path.name for path in segments(self.directory)}
        for name in sorted(here | on_record.keys()):
            one = _Found(self.directory / name, on_record.get(name, -1))
            found.append(one)
            one.read(restored, seed_of)
            mentioned |= one.groups
        open_now = {a.group for a in await rows.open_groups(mesh.state, job, mesh.name)}
        for one in found:
            if one.never_begun and open_now - mentioned:
                one.damage = "it is gone, or empty"
            if not one.damage:
                await self._adopt(one)
        await self._new_segment()
        left = restored.by_group()
        if any(one.damage for one in found):
            await self._go_on_without(found, restored, open_now)
        for group in left.keys() - open_now:
            await self.log((Kind.CLOSE, [group, "ended"]))
        for group in mentioned - open_now:
            await self.forget(group)
        return left

    async def _begin_anew(self, before: str, on_record: Iterable[str]) -> None:
        """Its predecessor's ledger lies on another host, and perhaps is gone with it: the groups
        that it had under way are lost, and their prompts go back.
        """
        mesh, job, token = self._mesh, self._job, self._mesh.token
        lost = await rows.open_groups(mesh.state, job, mesh.name)
        mesh.telemetry.log.warning("begins anew", ledger=before, groups=len(lost))
        for a in lost:
            op = f"anew.{token}.{a.group}"
            await rows.group_requeued(mesh.state, job, mesh.name, token, a.group, HOST_LOST, op)
        for name in on_record:
            await rows.forget_segment(mesh.state, job, mesh.name, token, name)
        for path in segments(self.directory):  # of an earlier time of the shard on this host
            path.unlink(missing_ok=True)

    async def _adopt(self, one: _Found) -> None:
        mesh, job, name = self._mesh, self._job, one.path.name
        if not one.path.exists():
            return await rows.forget_segment(mesh.state, job, mesh.name, mesh.token, name)
        if one.sealed < 0:
            await rows.note_segment(mesh.state, job, mesh.name, mesh.token, name, one.length)
        self._ledger.adopt(one.path, one.groups)

    async def _go_on_without(
        self, found: Sequence[_Found], restored: Restored, open_now: set[int]
    ) -> None:
        """Sets damaged segments aside when all that counts of open groups is written down again,
        in the new segment: each trajectory from its beginning.
        """
        batch: list[tuple[Kind, Any]] = []
        for record in _counted(found, open_now):
            batch.append((record.kind, record.payload))
            if len(batch) == AGAIN:
                await self.log(*batch, groups=open_now)
                batch = []
        await self.log(*batch, groups=open_now)
        await self._mesh.host.run_blocking(self._ledger.sync, deadline_s=WRITE_S)
        cut = {t.group for key, t in restored.trajectories.items() if key in restored.cut}
        for one in found:
            if one.damage:
                then = _then(open_now - restored.by_group().keys(), cut & open_now)
                await self._set_aside(one, then)

    async def _set_aside(self, one: _Found, then: str) -> None:
        mesh, path = self._mesh, one.path
        aside = damage.set_aside(path, self._here) if path.exists() else None
        told = damage.fields("ledger", path, one.damage, then, job=self._job, aside=aside)
        mesh.telemetry.log.error("damaged", **told)
        await patiently(mesh.clock, lambda: events.append(mesh.state, damage.EVENT, told))
        await rows.forget_segment(mesh.state, self._job, mesh.name, mesh.token, path.name)

    async def _new_segment(self) -> None:
        """Goes on in a new segment, on record before its first byte."""
        mesh, job = self._mesh, self._job
        name = self._ledger.next_path.name
        await rows.note_segment(mesh.state, job, mesh.name, mesh.token, name, -1)
        async with self._writing:
            await mesh.host.run_blocking(self._ledger.sync, deadline_s=WRITE_S)
            sealed = self._ledger.begin()
        if sealed is not None:
            path, length = sealed
            await rows.note_segment(mesh.state, job, mesh.name, mesh.token, path.name, length)

    async def forget(self, group: int) -> None:
        """The group has ended: segments that nothing needs now are deleted, and struck off."""
        mesh = self._mesh
        for path in self._ledger.forget(group):
            await rows.forget_segment(mesh.state, self._job, mesh.name, mesh.token, path.name)
            path.unlink(missing_ok=True)  # after that: one that is on record and gone is damage

    def defer(self, kind: Kind, payload: Any, group: int) -> None:
        self._ledger.defer(kind, payload, group)
        self._changed.set()

    async def log(self, *records: tuple[Kind, Any], groups: Iterable[int] = ()) -> None:
        """Writes records down; a full disk makes the trajectory wait, and loses nothing.

        What is logged while a write is under way goes with the next one.
        """
        done: Written = asyncio.get_running_loop().create_future()
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
                groups = {group for _, told, _ in queue for group in told}
                async with self._writing:
                    await self._write(self._ledger.block(records, groups))
                for _, _, done in queue:
                    if not done.done():
                        done.set_result(None)
        except Exception as error:  # what may have been written or not must not be written again
            self._mesh.host.exit(
                70, f"{self._mesh.name} cannot write its ledger: {error!r}", error, self._job
            )
        finally:
            self._writer = None

    async def _write(self, block: bytes) -> None:
        """Off the loop: a write waits behind the disk's own work."""
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
        write = self._mesh.host.run_blocking(self._ledger.write, block, deadline_s=WRITE_S)
        self._under_way = asyncio.ensure_future(write)
        await asyncio.shield(self._under_way)

    async def tokens(self, new: TokenRows) -> None:
        groups = np.unique(new.ids >> MEMBER_BITS).tolist()
        parts = ((Kind.TOKENS, part) for part in in_parts(new, PART_BYTES))
        await self.log(*parts, groups=groups)

    async def sync_forever(self) -> None:
        """Brings what was written to the disk, and goes on in a new segment when one is full. It
        rests while nothing is written.
        """
        synced = -1
        while True:
            await self._changed.wait()
            await self._mesh.clock.sleep(SYNC_S)
            self._changed.clear()
            await self.log()  # after all that was logged, and with what was deferred
            if synced != self._ledger.bytes_written:
                synced = self._ledger.bytes_written
                await self._mesh.host.run_blocking(self._ledger.sync, deadline_s=WRITE_S)
            if self._ledger.full:
                await patiently(self._mesh.clock, self._new_segment)

    async def close(self) -> None:
        """Ends with the write that is under way."""
        if self._writer is not None:
            self._writer.cancel()
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        self._ledger.close()
