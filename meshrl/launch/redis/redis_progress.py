"""How far the Redis of a mesh has come, by all that is known: the launcher's note, the records of
the runs, and what it has held since. By this it is told whether one is older than it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files import corruption
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state import rollback
from meshrl.common.state.server_state.rollback import StateWatermark
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.redis import aof, redis_note
from meshrl.launch.redis.redis_note import RedisNote
from meshrl.launch.redis.run_watermark import RunRecordReader


class RedisProgress:
    """`known` is as far as it has come. While it is `returning`, the jobs of a Redis that was lost
    are to be put back. `files` are those of the mesh's own, as they were when they were noted last.
    """

    def __init__(self, mesh_paths: MeshPaths) -> None:
        self._mesh_paths = mesh_paths
        self.watermark = StateWatermark()
        self.is_restoring = False
        self.file_extents: Mapping[str, aof.Extent] = {}
        self._lost_jobs: frozenset[str] = frozenset()  # jobs that were lost and are not missed
        self._deleted_jobs: dict[str, int] = {}  # jobs that were deleted since the start, and when
        self._token_floor = 0  # the highest below which no fencing token has been issued since
        self._run_records: dict[str, RunRecordReader] = {}  # of the mesh's runs
        self._write_lock = threading.Lock()  # one that was given up goes on in its thread
        self._aof_follower = aof.AofFollower(mesh_paths.redis_directory)
        self.pending_events: list[
            dict[str, Any]
        ] = []  # fields of events that Redis does not have yet

    def load(self) -> None:
        """What the note and the records of the runs tell. Blocks."""
        told = redis_note.read_note(self._mesh_paths.redis_note, self._quarantine_note)
        self.watermark = rollback.merge_watermarks(
            [told.mark, *self._read_run_watermarks(told.mark)]
        )
        self.is_restoring, self.file_extents = told.returning, dict(told.files)
        self._token_floor, self._lost_jobs = told.floor, frozenset(told.gone)

    def _quarantine_note(self, path: Path, error: CorruptData) -> None:
        aside, then = (
            corruption.quarantine(path, self._mesh_paths.root),
            corruption.RECOVERY_BY_KIND["redis note"],
        )
        found = corruption.make_event_fields(
            "redis note", path, error.message, then, quarantined_path=aside
        )
        print(corruption.describe_event(found), file=sys.stderr, flush=True)
        self.pending_events.append(found)

    def _read_run_watermarks(self, watermark: StateWatermark) -> list[StateWatermark]:
        """By the records of the runs that the mesh has had."""
        runs = {job: Path(one.run_dir) for job, one in watermark.jobs.items() if one.run_dir}
        about = self._mesh_paths.root / "job.json"
        if about.is_file():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # told when it is read
                runs[str(json.loads(about.read_bytes())["job"])] = self._mesh_paths.root
        for job, directory in runs.items():
            self._run_records.setdefault(job, RunRecordReader(directory, job))
        return [record.read_watermark() for record in self._run_records.values()]

    # -- whether it is what it was ---------------------------------------------------------------

    def explain_difference(self) -> str:
        """Why its file is not what was noted; empty when it is. Blocks."""
        try:
            return aof.explain_difference(self._mesh_paths.redis_directory, self.file_extents)
        except OSError as error:
            return f"its file cannot be read: {error}"

    async def read_watermark(self, state: StateClient) -> StateWatermark:
        """Return what it holds now; `known` is brought up to date with the records of the runs."""
        await self._merge_run_records()
        return await rollback.read_watermark(state, self.watermark)

    async def check_rollback(
        self, state: StateClient, reads_records: bool = True
    ) -> tuple[StateWatermark, str]:
        """Return what it holds, and why that is older than it was, if it is.

        It is compared with what was known when it was asked: meanwhile more may have become known,
        of events that it was not asked about. `records`: read the records of the runs before.
        """
        if reads_records:
            await self._merge_run_records()
        known = self.watermark
        found = await rollback.read_watermark(state, known)
        return found, self._explain_rollback(found, known)

    async def _merge_run_records(self) -> None:
        told = await asyncio.to_thread(self._read_run_watermarks, self.watermark)
        self.watermark = rollback.merge_watermarks([self.watermark, *told])

    def _explain_rollback(self, current: StateWatermark, expected: StateWatermark) -> str:
        """Why one that holds `found` is older than what was `known`; empty when it is not."""
        expected = rollback.drop_deleted_jobs(expected, self._drop_deleted_jobs(current))
        if self.is_restoring:
            return rollback.explain_rollback(current, expected, expected.jobs)
        if again := self._lost_jobs & current.jobs.keys():  # as others, perhaps, of the same names
            anew = {job: current.jobs[job] for job in again}
            expected = replace(expected, jobs={**expected.jobs, **anew})
            self.watermark = replace(self.watermark, jobs={**self.watermark.jobs, **anew})
            self._lost_jobs -= again
            self._run_records = {
                job: told for job, told in self._run_records.items() if job not in again
            }
        return rollback.explain_rollback(current, expected, self._lost_jobs)

    def _drop_deleted_jobs(self, current: StateWatermark) -> Collection[str]:
        """Jobs that were deleted, which are returned, are missed no more. Each deletion counts
        once: of another job that has the name since, all is known anew.
        """
        gone = {
            job: at_ms
            for job, at_ms in current.deleted.items()
            if job not in current.jobs or self._deleted_jobs.get(job) != at_ms
        }
        if gone:
            self.watermark = rollback.drop_deleted_jobs(self.watermark, gone)
            self._deleted_jobs |= gone
            self._run_records = {
                job: told for job, told in self._run_records.items() if job not in gone
            }
        return gone.keys()

    # -- what is known from now on ---------------------------------------------------------------

    def compute_token_floor(self, current: StateWatermark) -> int:
        """The floor that fencing tokens of one that holds `found` are to be raised to."""
        if not self.is_restoring:
            self.watermark = rollback.merge_watermarks([self.watermark, current])
        self._token_floor = rollback.compute_token_floor(
            current, self.watermark, StateWatermark(token=self._token_floor)
        )
        return self._token_floor

    def finish_restore(self, current: StateWatermark) -> None:
        """The jobs are back that go on: those that are not there now are not missed any more."""
        self._lost_jobs = frozenset(self.watermark.jobs.keys() - current.jobs.keys())
        self.watermark = rollback.merge_watermarks([self.watermark, current])
        self.is_restoring = False

    def reset_aof_follower(self) -> None:
        """Its file may have been cut or made again."""
        self._aof_follower = aof.AofFollower(self._mesh_paths.redis_directory)

    def read_extents(self) -> Mapping[str, aof.Extent]:
        return self._aof_follower.read_extents()

    def record_progress(
        self, current: StateWatermark, newest_event: str, extents: Mapping[str, aof.Extent]
    ) -> None:
        """It holds `found`, its newest event is `newest`, and its files were as `look` said."""
        if aof.has_extents(self._mesh_paths.redis_directory, extents):
            self.file_extents = extents
        self.watermark = rollback.merge_watermarks(
            [self.watermark, current, StateWatermark(newest_event)]
        )

    def write(self) -> None:
        """Notes all of it. Blocks. StorageFull."""
        gone = tuple(sorted(self._lost_jobs))
        told = RedisNote(
            self.watermark, self.file_extents, self._token_floor, gone, self.is_restoring
        )
        with self._write_lock:
            redis_note.write_note(self._mesh_paths.redis_note, told)
