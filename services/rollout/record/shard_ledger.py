"""The ledger of one job on one shard: its segments, which Redis names, and what a predecessor
left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import StorageFull
from common.job.job_data import JobData
from common.records.ledger import MAX_RECORD, Kind, Ledger, groups_of, scan, segments
from common.records.token_record import MEMBER_BITS, TokenRows, in_parts
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import groups as rows
from services.rollout.trajectory import Restored, Trajectory

SYNC_S = 0.05  # what a host crash may cost (`fsync_ms`)
FULL_RETRY_S = 0.5
PART_BYTES = MAX_RECORD // 2  # most in a record of tokens, which grows while the disk is full
WRITE_S = 60.0  # a disk that takes longer has failed

Written = asyncio.Future[None]


class ShardLedger:
    """Writes records down before they count; Redis names each segment and where it is sealed."""

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._mesh, self._job = mesh, job.id
        directory = job.run_dir / "ledger" / mesh.name.replace("/", "-")
        self._ledger = Ledger(mesh.host, directory, f"{mesh.token:012d}")
        self._queue: list[tuple[tuple[tuple[Kind, Any], ...], Iterable[int], Written]] = []
        self._writer: asyncio.Task[None] | None = None
        self._under_way: Written | None = None
        self._writing = asyncio.Lock()  # held while the open segment must stay the same

    @property
    def directory(self) -> Path:
        """Where the shard's segments lie."""
        return self._ledger.directory

    @property
    def bytes_written(self) -> int:
        return self._ledger.bytes_written

    async def take_over(self, seed_of: Callable[[int, int], int]) -> dict[int, list[Trajectory]]:
        """Claims the shard; what its predecessor left of the groups that are still open.

        A predecessor's segments are sealed at their last whole record first: what it may still
        write is not read.
        """
        mesh, job = self._mesh, self._job
        on_record = await rows.claim_shard(mesh.state, job, mesh.name, mesh.token)
        restored = Restored()
        mentioned: set[int] = set()
        for path in segments(self._ledger.directory):
            sealed = on_record.get(path.name, -1)
            length, here = 0, set()
            for record, end in scan(path, sealed):
                restored.apply(record, seed_of)
                here |= groups_of(record)
                length = end
            if sealed < 0:
                await rows.note_segment(mesh.state, job, mesh.name, mesh.token, path.name, length)
            self._ledger.adopt(path, here)
            mentioned |= here
        await self._new_segment()
        left = restored.by_group()
        still_open = {a.group for a in await rows.open_groups(mesh.state, job, mesh.name)}
        for group in left.keys() - still_open:
            await self.log((Kind.CLOSE, [group, "ended"]))
        for group in mentioned - still_open:
            await self.forget(group)
        return left

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

    def defer(self, kind: Kind, payload: Any, group: int) -> None:
        """A record that may go with the next one: see `Ledger.defer`."""
        self._ledger.defer(kind, payload, group)

    async def log(self, *records: tuple[Kind, Any], groups: Iterable[int] = ()) -> None:
        """Writes records down; a full disk makes the trajectory wait, and loses nothing.

        What is logged while a write is under way goes with the next one.
        """
        done: Written = asyncio.get_running_loop().create_future()
        self._queue.append((records, groups, done))
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
        """New tokens of trajectories."""
        groups = np.unique(new.ids >> MEMBER_BITS).tolist()
        parts = ((Kind.TOKENS, part) for part in in_parts(new, PART_BYTES))
        await self.log(*parts, groups=groups)

    async def sync_forever(self) -> None:
        """Brings what was written to the disk, and goes on in a new segment when one is full."""
        synced = -1
        while True:
            await self._mesh.clock.sleep(SYNC_S)
            await self.log()
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
