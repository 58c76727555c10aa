"""Recorder of a run while it runs: events.jsonl, metrics.jsonl, and its processes' usage.

It only appends what is missing, so a run that was cut off and resumed has one record. It
quarantines corrupt files, rebuilds them, and reports that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.base.errors import (
    CorruptData,
    DeadlineExceeded,
    HistoryLost,
    NotFound,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.files import corruption
from meshrl.common.base.files.remote_directory import is_url
from meshrl.common.mesh.process.diagnosis.failure import DISK_FULL_ERRNOS
from meshrl.common.records.checkpoints import is_initial, list_manifest_paths
from meshrl.common.state import events, groups, jobs, readers, steps
from meshrl.directory import job_file
from meshrl.directory.directory_paths import read_json, read_json_or_empty, write_json
from meshrl.directory.watched_documents import WatchedDocument
from meshrl.view import disk_full
from meshrl.view.history.run_snapshot import (
    RunHistory,
    RunReading,
    RunSnapshot,
    build_snapshot,
    parse_evaluations,
)
from meshrl.view.mesh import prefix_stats
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.recording.disk_space import DiskSpaceWaiter
from meshrl.view.recording.job_usage import JobUsage
from meshrl.view.recording.output_copy import OutputCopier
from meshrl.view.recording.run_record import (
    EVENTS_FILE,
    METRICS_FILE,
    RECORD_END_FILE,
    RecordEnd,
    RunRecordWriter,
    find_last_step,
    find_last_valid_step,
    select_evaluations,
)
from meshrl.view.recording.shared_snapshot import RunningMesh, SharedSnapshot
from meshrl.view.trackers.tracker_processes import PROGRESS_FILE, Trackers

T = TypeVar("T")

POLL_S = 0.5
POLL_TIMEOUT_S = 4.0  # for one poll; Redis is restarted after 8 s of silence
CURSOR_INTERVAL_S = 5.0  # between reports of its position: Redis trims no event beyond it


class Recorder:
    """Recorder of one job of a `mesh` into its run directory. Recorders of one mesh share a
    snapshot.

    Raises OSError when the directory is missing or full, CorruptData when `job.json` is unreadable.
    """

    def __init__(
        self,
        mesh: RunningMesh,
        job: str,
        run_dir: Path,
        shared_snapshot: SharedSnapshot | None = None,
    ) -> None:
        self.mesh, self.job, self.run_dir = mesh, job, run_dir
        self._shared_snapshot = shared_snapshot or SharedSnapshot(mesh)
        self.snapshot: RunSnapshot | None = None
        self._pending_events: list[
            dict[str, Any]
        ] = []  # corruption events that Redis does not have yet
        self._job_file = WatchedDocument(
            "job", run_dir / job_file.JOB_FILE_NAME, run_dir, job, job_file.read_job_file
        )
        # Read the existing record; write nothing.
        self.record = RunRecordWriter(run_dir, job)
        self.usage = self._read_or_quarantine("usage", "usage.json", JobUsage.read) or JobUsage()
        self.record.apply_record_end(
            self._read_or_quarantine(
                "mark", RECORD_END_FILE, lambda path: RecordEnd.read(path.parent)
            )
        )
        self._evaluations = select_evaluations(self.record.evaluation_events, job)
        self._cursor = self.record.last_event_id  # the last event of the stream
        self._trackers_need_history = (
            True  # recorded rows are pending, until this session's trackers have them
        )
        stored_progress = self._read_or_quarantine("tracking", PROGRESS_FILE, read_json)
        host, clock = mesh.host, mesh.clock
        self.trackers = Trackers.from_job_file(
            run_dir, self.job_file_content, stored_progress or {}, host, clock
        )
        out = str(self.job_file_content["document"].get("out", ""))
        self._output_copier = OutputCopier(out, run_dir, host, clock) if is_url(out) else None
        self._last_checkpoint = ""  # the last checkpoint
        self._copy_error = ""  # last reported error of the output copier
        self._history = RunHistory()
        self._clock = mesh.clock
        self._started_s, self._session_started_ms = (
            self._clock.monotonic(),
            int(1000 * self._clock.wall()),
        )
        self._counted_at_s = float("-inf")  # time of the counted CPU reading
        self._reader_name = readers.recorder_name(job)
        self._cursor_recorded_at_s: float | None = (
            None  # time of the last position report; None: not registered
        )
        self._silent_since_s: float | None = None
        self._disk_full_reason = ""  # which disk is full
        self._disk_full_since_s: float | None = None
        self._write_error = ""  # why the last poll could not write

    def _read_or_quarantine(self, kind: str, name: str, read: Callable[[Path], T]) -> T | None:
        """Read a file; return None when it is missing, or is corrupt and quarantined."""
        path = self.run_dir / name
        if not path.exists():
            return None
        try:
            return read(path)
        except (CorruptData, KeyError, TypeError, ValueError, AttributeError) as error:
            why = (
                error.message
                if isinstance(error, CorruptData)
                else f"it is not a valid {kind} file: {error!r}"
            )
            quarantined_path = corruption.quarantine(path, self.run_dir)
            then = corruption.RECOVERY_BY_KIND[kind]
            self._pending_events.append(
                corruption.make_event_fields(
                    kind, path, why, then, job=self.job, quarantined_path=quarantined_path
                )
            )
            return None

    @property
    def job_file_content(self) -> dict[str, Any]:
        """Content of `job.json`."""
        return self._job_file.content

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the last steps, at least a thousand where there are as many."""
        return self.record.recent_rows

    @property
    def wall_s(self) -> float:
        """Seconds of wall time of this session and those before it."""
        return self.usage.wall_s + self._clock.monotonic() - self._started_s

    async def poll(self) -> RunSnapshot | None:
        """Return the current snapshot, or the last one, marked, while Redis is silent."""
        now, write_error = self._clock.monotonic(), ""
        try:
            await self._repair()
            async with self._clock.timeout(POLL_TIMEOUT_S, "reading the run"):
                self.snapshot = await self._read_snapshot()
            self._silent_since_s = None
        except (StateUnavailable, DeadlineExceeded):
            self._silent_since_s = self._silent_since_s or now
            silent = f"redis has not answered for {now - self._silent_since_s:.0f} s"
            if self.snapshot is not None:
                self.snapshot = replace(self.snapshot, stale_reason=silent, elapsed_s=self.wall_s)
        except NotFound:  # Redis went back, and has not been given its jobs again
            if not self.mesh.is_restoring_state:
                raise
        except StorageFull as error:
            write_error = disk_full.describe_rejected_write(error, self.run_dir)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            write_error = disk_full.describe_full_disk(self.run_dir)
        self._write_error = write_error
        await self._watch_disk_space(write_error)
        return self.snapshot

    async def _watch_disk_space(self, write_error: str) -> None:
        """Show a full disk while it is full, and record it."""
        now = self._clock.monotonic()
        text = write_error or disk_full.find_full_disk([self.run_dir, self.mesh.mesh_paths.root])
        if text:
            self._disk_full_reason, self._disk_full_since_s = text, self._disk_full_since_s or now
        elif self._disk_full_since_s is not None:
            fields = {
                "job": self.job,
                "why": self._disk_full_reason,
                "seconds": now - self._disk_full_since_s,
            }
            self._disk_full_reason, self._disk_full_since_s = "", None
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                async with self._clock.timeout(POLL_TIMEOUT_S, "appending to the event stream"):
                    await events.append(self.mesh.state, "storage_full", fields)
        if self.snapshot is not None:
            self.snapshot = replace(
                self.snapshot,
                disk_full_reason=self._disk_full_reason or self.snapshot.disk_full_reason,
            )

    async def close(self, has_given_up: Callable[[], bool] = lambda: False) -> None:
        """Poll a last time, when the services have ended: the trajectories in flight are final.

        Waits for disk space until `has_given_up`: the next session records the rest.
        """
        room = DiskSpaceWaiter(self._clock, has_given_up)
        await room.write_when_space(lambda: self._count_cpu(force=True))
        await self.poll()
        while self._write_error and not room.should_give_up(self._write_error):
            await room.wait()
            await self.poll()
        if self._silent_since_s is not None:  # no count fits a record without its last events
            return await self.trackers.close()
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self._clock.timeout(POLL_TIMEOUT_S, "counting trajectories in flight"):
                counted = asdict(await groups.count_in_flight(self.mesh.state, self.job))
            mark = {"event": self.record.last_event_id, "events": self.record.event_count} | counted
            if await room.write_when_space(
                lambda: write_json(self.run_dir / RECORD_END_FILE, mark)
            ):
                async with self._clock.timeout(POLL_TIMEOUT_S, "recording the end of the record"):
                    await self._record_cursor(
                        has_left=self.snapshot is not None and self.snapshot.is_terminal
                    )
        await self.trackers.close()

    @property
    def output_url(self) -> str:
        """URL that the job names in `out`, redacted for display; empty: it names none."""
        return self._output_copier.public_url if self._output_copier is not None else ""

    async def finish_copy(self, stop: asyncio.Event) -> str:
        """Copy the rest of the run to the URL in `out`, if any; return why files are missing.

        Once `stop` is set there is little time left.
        """
        return (
            await self._output_copier.close(self._last_checkpoint, stop)
            if self._output_copier is not None
            else ""
        )

    async def _copy_output(self) -> None:
        if self._output_copier is None:
            return
        self._output_copier.copy_if_due(self._last_checkpoint)
        before, self._copy_error = self._copy_error, self._output_copier.error
        if self._copy_error not in ("", before):
            event_fields = {"job": self.job, "error": self._copy_error}
            await events.append(self.mesh.state, "out_failed", event_fields)

    async def abandon(self) -> None:
        """Leave the record as it is: nothing can be written there."""
        if self._output_copier is not None:
            self._output_copier.abandon()
        with contextlib.suppress(OSError):
            await self.trackers.close()

    async def _read_snapshot(self) -> RunSnapshot:
        if self._trackers_need_history:
            self._trackers_need_history = False
            if self.trackers.trackers:
                self.trackers.enqueue(list(self.record.iterate_rows()), self._evaluations)
        state = self.mesh.state
        row = await jobs.read_job(state, self.job)
        new_events = await self._read_new_events()
        self._drop_abandoned_rows(row.steps_done, new_events)
        new_rows = await steps.read_step_rows(state, self.job, after_step=find_last_step(self.rows))
        look = await self._shared_snapshot.read_snapshot()
        self._append(new_rows, new_events)
        if self._clock.monotonic() - (self._cursor_recorded_at_s or 0.0) >= CURSOR_INTERVAL_S:
            await self._record_cursor()
        self._count_usage(look)
        # Only the first checkpoint records whether the warm start came from the cache.
        first = next(iter(list_manifest_paths(self.run_dir)), None)
        if not self.usage.warm_start_cached and first is not None and is_initial(first):
            account = read_json_or_empty(first).get("account", {})
            self.usage.warm_start_cached = bool(account.get("warm_start_cached", False))
        self._last_checkpoint = row.checkpoint
        await self._copy_output()
        reading = RunReading(
            elapsed_s=self.wall_s,
            job=row,
            step_rows=self.rows,
            mesh=look,
            evaluations=parse_evaluations(self._evaluations),
            events=new_events,
        )
        return build_snapshot(reading, self._history)

    async def _repair(self) -> None:
        """Rebuild files that are corrupt or were changed by others, and record that.

        The time depends on the files, so no poll's deadline covers it; each command to Redis has
        its own deadline.
        """
        state, host = self.mesh.state, self.mesh.host
        self.record.check_files()
        if EVENTS_FILE in self.record.faults:
            self._pending_events.append(await self.record.repair_events(state, host))
            self._evaluations = select_evaluations(self.record.evaluation_events, self.job)
            self._cursor = max(self._cursor, self.record.last_event_id, key=events.parse_event_id)
        if METRICS_FILE in self.record.faults:
            self._pending_events.append(await self.record.repair_metrics(state, host))
        if (event_fields := self._job_file.repair_if_changed()) is not None:
            self._pending_events.append(event_fields)
        while self._pending_events:
            await events.append(state, corruption.CORRUPTION_EVENT, self._pending_events[0])
            del self._pending_events[0]

    async def _read_new_events(self) -> list[events.Event]:
        """Return the events since the last poll. A gap in the events is recorded."""
        state, missed = self.mesh.state, list[events.Event]()
        if self._cursor_recorded_at_s is None:
            missed = await self._register_reader()
        try:
            return missed + await events.read_all(state, self._cursor)
        except HistoryLost as lost:
            where = str(self.run_dir)
            self._cursor = await readers.record_history_loss(state, self.job, where, lost)
            return missed + await events.read_all(state, self._cursor)

    async def _register_reader(self) -> list[events.Event]:
        """Register the recorder as a reader; return the corruption events between two sessions.

        Such corruption, as of Redis' own file, precedes the event by which the job resumes, from
        which recorders read.
        """
        state, recorded = self.mesh.state, self._cursor
        self._cursor = await readers.join(state, self._reader_name, recorded, str(self.run_dir))
        self._cursor_recorded_at_s = self._clock.monotonic()
        if events.parse_event_id(recorded) == (0, 0):  # the run has no earlier session
            return []
        between = await events.read_between(state, recorded, self._cursor)
        return [event for event in between if event.kind == corruption.CORRUPTION_EVENT]

    async def _record_cursor(self, *, has_left: bool = False) -> None:
        """Publish the position up to which events are recorded, so that Redis can trim them."""
        state, where, step = self.mesh.state, str(self.run_dir), find_last_step(self.rows)
        await readers.record_cursor(
            state, self._reader_name, self._cursor, where, step=step, has_left=has_left
        )
        self._cursor_recorded_at_s = self._clock.monotonic()

    def _drop_abandoned_rows(self, steps_done: int, new_events: list[events.Event]) -> None:
        """Truncate the rows of steps that a new lineage has abandoned."""
        last = find_last_valid_step(steps_done, new_events, self.job)
        if last < find_last_step(self.rows):
            self.record.truncate_rows(last)
            self.trackers.rewind(last)

    def _append(self, rows: list[dict[str, Any]], new_events: list[events.Event]) -> None:
        if rows:
            self.record.add_rows(rows)
            self.trackers.enqueue(rows, [])
        if mine := self.record.select_own(new_events):
            self.record.add_events(mine)
            self._cursor = mine[-1].id
            self._evaluations = select_evaluations([*self._evaluations, *mine], self.job)
            self.trackers.enqueue([], select_evaluations(mine, self.job))
        if new_events:
            self._cursor = new_events[-1].id

    def _count_usage(self, mesh_snapshot: MeshSnapshot) -> None:
        """Count tokens, accelerators and CPU time of the job."""
        for entry in mesh_snapshot.entries:
            tokens = entry.stats.get("tokens")
            if tokens and self._shared_snapshot.owner_jobs.get(entry.name, self.job) == self.job:
                self.usage.update_tokens(entry.name, entry.incarnation, float(tokens))
                if found := prefix_stats.extract_figures(entry.stats):
                    self.usage.prefixes[entry.incarnation] = found
        self.usage.update_workers(mesh_snapshot, self.job, self._shared_snapshot.taken_at_s)
        self._count_cpu()

    def _count_cpu(self, force: bool = False) -> None:
        """Count CPU time: from the start for the job that the mesh was started for, else from now
        on.
        """
        at = self._shared_snapshot.measure_cpu(force)
        if at == self._counted_at_s:
            return
        self._counted_at_s = at
        among = sum(row.id != self.job for row in self._shared_snapshot.latest.live_jobs) + 1
        counts_earlier_use = self.mesh.mesh_paths.root == self.run_dir
        owners, used = self._shared_snapshot.owner_jobs, self._shared_snapshot.process_usage
        self.usage.update_processes(used, owners, self.job, among, counts_earlier_use)
        self.usage.update_session(self._session_started_ms, int(1000 * self._clock.wall()))
        self.usage.write(self.run_dir / "usage.json", self._clock.monotonic() - self._started_s)
