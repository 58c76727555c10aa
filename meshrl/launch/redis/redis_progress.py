"""Progress of the mesh's Redis, from the note, the run records and its earlier states.

It shows whether a Redis is older than it was.
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
    """Furthest known progress of a Redis.

    While `is_restoring`, the jobs of a lost Redis are to be restored. `file_extents` are the files
    of the mesh's own server at the last note.
    """

    def __init__(self, mesh_paths: MeshPaths) -> None:
        self._mesh_paths = mesh_paths
        self.watermark = StateWatermark()
        self.is_restoring = False
        self.file_extents: Mapping[str, aof.Extent] = {}
        self._lost_jobs: frozenset[str] = frozenset()  # lost jobs that are no longer expected
        self._deleted_jobs: dict[str, int] = {}  # jobs that were deleted since the start, and when
        self._token_floor = 0  # the highest below which no fencing token has been issued since
        self._run_records: dict[str, RunRecordReader] = {}  # by run of the mesh
        self._write_lock = threading.Lock()  # an abandoned write continues in its thread
        self._aof_follower = aof.AofFollower(mesh_paths.redis_directory)
        self.pending_events: list[
            dict[str, Any]
        ] = []  # fields of events that Redis does not have yet

    def load(self) -> None:
        """Load the progress from the note and the records of the runs. Blocks."""
        note = redis_note.read_note(self._mesh_paths.redis_note, self._quarantine_note)
        self.watermark = rollback.merge_watermarks(
            [note.watermark, *self._read_run_watermarks(note.watermark)]
        )
        self.is_restoring, self.file_extents = note.is_restoring, dict(note.file_extents)
        self._token_floor, self._lost_jobs = note.token_floor, frozenset(note.lost_jobs)

    def _quarantine_note(self, path: Path, error: CorruptData) -> None:
        quarantined_path, then = (
            corruption.quarantine(path, self._mesh_paths.root),
            corruption.RECOVERY_BY_KIND["redis note"],
        )
        found = corruption.make_event_fields(
            "redis note", path, error.message, then, quarantined_path=quarantined_path
        )
        print(corruption.describe_event(found), file=sys.stderr, flush=True)
        self.pending_events.append(found)

    def _read_run_watermarks(self, watermark: StateWatermark) -> list[StateWatermark]:
        """Return the watermarks from the records of the mesh's runs."""
        runs = {job: Path(one.run_dir) for job, one in watermark.jobs.items() if one.run_dir}
        about = self._mesh_paths.root / "job.json"
        if about.is_file():
            # A reader of the file reports its errors.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                runs[str(json.loads(about.read_bytes())["job"])] = self._mesh_paths.root
        for job, directory in runs.items():
            self._run_records.setdefault(job, RunRecordReader(directory, job))
        return [record.read_watermark() for record in self._run_records.values()]

    # -- comparison with earlier states ----------------------------------------------------------

    def explain_difference(self) -> str:
        """Return why the file differs from the note; empty when it does not. Blocks."""
        try:
            return aof.explain_difference(self._mesh_paths.redis_directory, self.file_extents)
        except OSError as error:
            return f"its file cannot be read: {error}"

    async def read_watermark(self, state: StateClient) -> StateWatermark:
        """Return its current watermark; merge the runs' records into the known one before."""
        await self._merge_run_records()
        return await rollback.read_watermark(state, self.watermark)

    async def check_rollback(
        self, state: StateClient, reads_records: bool = True
    ) -> tuple[StateWatermark, str]:
        """Return its current watermark, and why that is older than it was, if it is.

        The comparison is with the progress known at the request: later progress may include events
        that the request did not cover. `reads_records`: read the records of the runs before.
        """
        if reads_records:
            await self._merge_run_records()
        known = self.watermark
        found = await rollback.read_watermark(state, known)
        return found, self._explain_rollback(found, known)

    async def _merge_run_records(self) -> None:
        run_watermarks = await asyncio.to_thread(self._read_run_watermarks, self.watermark)
        self.watermark = rollback.merge_watermarks([self.watermark, *run_watermarks])

    def _explain_rollback(self, current: StateWatermark, expected: StateWatermark) -> str:
        """Return why `current` is older than `expected`; empty when it is not."""
        expected = rollback.drop_deleted_jobs(expected, self._drop_deleted_jobs(current))
        if self.is_restoring:
            return rollback.explain_rollback(current, expected, expected.jobs)
        if again := self._lost_jobs & current.jobs.keys():  # perhaps other jobs with these names
            new_jobs = {job: current.jobs[job] for job in again}
            expected = replace(expected, jobs={**expected.jobs, **new_jobs})
            self.watermark = replace(self.watermark, jobs={**self.watermark.jobs, **new_jobs})
            self._lost_jobs -= again
            self._run_records = {
                job: record for job, record in self._run_records.items() if job not in again
            }
        return rollback.explain_rollback(current, expected, self._lost_jobs)

    def _drop_deleted_jobs(self, current: StateWatermark) -> Collection[str]:
        """Drop deleted jobs from the expected ones, and return them.

        Each deletion counts once: a later job with the same name starts its progress again.
        """
        deleted = {
            job: at_ms
            for job, at_ms in current.deleted.items()
            if job not in current.jobs or self._deleted_jobs.get(job) != at_ms
        }
        if deleted:
            self.watermark = rollback.drop_deleted_jobs(self.watermark, deleted)
            self._deleted_jobs |= deleted
            self._run_records = {
                job: record for job, record in self._run_records.items() if job not in deleted
            }
        return deleted.keys()

    # -- updates of the known progress -----------------------------------------------------------

    def compute_token_floor(self, current: StateWatermark) -> int:
        """Return the floor for the fencing tokens of a Redis that holds `current`."""
        if not self.is_restoring:
            self.watermark = rollback.merge_watermarks([self.watermark, current])
        self._token_floor = rollback.compute_token_floor(
            current, self.watermark, StateWatermark(token=self._token_floor)
        )
        return self._token_floor

    def finish_restore(self, current: StateWatermark) -> None:
        """Finish the restore: jobs that are not present now are no longer expected."""
        self._lost_jobs = frozenset(self.watermark.jobs.keys() - current.jobs.keys())
        self.watermark = rollback.merge_watermarks([self.watermark, current])
        self.is_restoring = False

    def reset_aof_follower(self) -> None:
        """Reset the follower, as the file may have been truncated or recreated."""
        self._aof_follower = aof.AofFollower(self._mesh_paths.redis_directory)

    def read_extents(self) -> Mapping[str, aof.Extent]:
        return self._aof_follower.read_extents()

    def record_progress(
        self, current: StateWatermark, newest_event: str, extents: Mapping[str, aof.Extent]
    ) -> None:
        """Record the current watermark, the newest event and the extents of its files."""
        if aof.has_extents(self._mesh_paths.redis_directory, extents):
            self.file_extents = extents
        self.watermark = rollback.merge_watermarks(
            [self.watermark, current, StateWatermark(newest_event)]
        )

    def write(self) -> None:
        """Write all of it to the note. Blocks. Raises StorageFull."""
        lost_jobs = tuple(sorted(self._lost_jobs))
        note = RedisNote(
            self.watermark, self.file_extents, self._token_floor, lost_jobs, self.is_restoring
        )
        with self._write_lock:
            redis_note.write_note(self._mesh_paths.redis_note, note)
