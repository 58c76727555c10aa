"""`meshrl watch`: the view of a run of another process, or of a mesh with several jobs.

It lasts until the last job has ended, and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import HistoryLost, NotFound, Refused
from meshrl.common.base.files import json_lines
from meshrl.common.state import events, jobs, steps
from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.command_target import (
    RunLocation,
    may_be_running,
    read_run,
    read_run_row,
    resolve_bare_mesh,
    resolve_run,
)
from meshrl.directory.directory_paths import MeshPaths, format_path, read_json_or_empty
from meshrl.directory.mesh_query import query_mesh
from meshrl.runs.monitoring.mesh_polling import poll_mesh
from meshrl.runs.monitoring.slice_observer import SliceObserver
from meshrl.runs.outcome import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_LEARNED,
    EXIT_STOPPED,
    read_outcome,
)
from meshrl.view.health.findings import Finding, has_failure
from meshrl.view.history.job_events import JobEventFilter
from meshrl.view.history.run_snapshot import (
    RunHistory,
    RunReading,
    RunSnapshot,
    build_snapshot,
    parse_evaluations,
)
from meshrl.view.live.mesh_view import make_mesh_view
from meshrl.view.live.run_view import ScreenView, make_run_view
from meshrl.view.mesh.mesh_frames import MeshWatcher
from meshrl.view.mesh.mesh_snapshot import read_mesh_snapshot
from meshrl.view.recording.recorder import POLL_TIMEOUT_S
from meshrl.view.recording.run_record import (
    MAX_ROWS_IN_MEMORY,
    find_last_step,
    find_last_valid_step,
    read_events,
    select_evaluations,
)


class RunObserver:
    """Observer of a run through the Redis of its mesh, beside the recorder.

    Recorded data is read from the files, as Redis may have trimmed it.
    """

    def __init__(self, state: StateClient, run: RunLocation) -> None:
        self._state, self._run = state, run
        self.rows = list(
            deque(
                json_lines.iterate_rows(run.directory / "metrics.jsonl"), maxlen=MAX_ROWS_IN_MEMORY
            )
        )
        self._history, self._last_event = RunHistory(), "0"
        self._evaluation_events: list[events.Event] = []
        self._recorded_events: list[events.Event] | None = read_events(run.directory)
        self._belonging = JobEventFilter(run.job)

    async def read_snapshot(self) -> RunSnapshot:
        """Return the run's snapshot. Raises NotFound or Refused when the mesh no longer has the
        run.
        """
        state, run = self._state, self._run
        row = await read_run_row(state, run)
        new = await self._read_new_events()
        mine = [event for event in new if self._belonging.accept(event)]
        if new:
            self._last_event = new[-1].id
        last = find_last_valid_step(row.steps_done, mine, run.job)
        self.rows = [r for r in self.rows[-MAX_ROWS_IN_MEMORY:] if r["step"] <= last]
        self.rows += await steps.read_step_rows(
            state, run.job, after_step=find_last_step(self.rows)
        )
        self._evaluation_events = select_evaluations([*self._evaluation_events, *mine], run.job)
        reading = RunReading(
            elapsed_s=compute_elapsed_s(run.directory),
            job=row,
            step_rows=self.rows,
            mesh=await read_mesh_snapshot(state),
            evaluations=parse_evaluations(self._evaluation_events),
            events=mine,
        )
        return build_snapshot(reading, self._history)

    async def read_snapshot_and_rows(self) -> tuple[RunSnapshot, list[dict[str, Any]]]:
        """Return the run's snapshot, and the rows of its steps."""
        return await self.read_snapshot(), self.rows

    async def _read_new_events(self) -> list[events.Event]:
        """Return the events since the last poll; at first all recorded ones.

        A line reports a gap in the events.
        """
        recorded, self._recorded_events = self._recorded_events or [], None
        if recorded:
            self._last_event = recorded[-1].id
        try:
            return recorded + await events.read_all(self._state, self._last_event)
        except HistoryLost as lost:
            self._history.alerts.append(str(lost))
            self._last_event = lost.through
            return recorded + await events.read_all(self._state, self._last_event)


def compute_elapsed_s(run_dir: Path) -> float:
    """Return the seconds of wall time of a run, as its recorder counts them."""
    path = run_dir / "usage.json"
    usage = read_json_or_empty(path)
    if "wall_s" not in usage:
        return 0.0
    return float(usage["wall_s"]) + max(0.0, time.time() - path.stat().st_mtime)


def watch_run(target: Path | None, mesh: Path | None) -> int:
    """Show the run until it is over or Ctrl-C; return the exit status for its end.

    Show all jobs of a mesh that works on several.
    """
    place = resolve_bare_mesh(target, mesh)
    if (
        place is not None
        and may_be_running(place)
        and query_mesh(place, has_several_jobs, POLL_TIMEOUT_S)
    ):
        return _watch_all(place)
    run = resolve_run(target, mesh)
    if not may_be_running(run.mesh_paths):
        found = read_outcome(run, is_live=False)
        print("\n".join(found.format_lines()))
        return found.exit_status
    try:
        last = asyncio.run(_show_run(run))
    except KeyboardInterrupt:
        print(f"\n{run.job} continues; `meshrl watch {run.display_path}` shows it again")
        return EXIT_INTERRUPTED
    if last is None or not last.is_terminal:
        found = read_outcome(run)
    else:  # the recorder may not have written the end down yet
        found = replace(
            read_outcome(run, is_live=False),
            state=last.phase.value,
            phase=last.phase.value,
            step=last.step,
            reward=last.rewards[-1] if last.rewards else None,
            error=last.error,
        )
    print("\n".join(found.format_lines()))
    return found.exit_status


async def _show_run(run: RunLocation) -> RunSnapshot | None:
    """Return the last snapshot of the run; None if there was none."""
    last: RunSnapshot | None = None
    with make_run_view(run.directory) as view:
        found = poll_mesh(
            run.mesh_paths,
            view.print_line,
            lambda state: RunObserver(state, run).read_snapshot_and_rows,
        )
        try:
            async with aclosing(found), SliceObserver(run.mesh_paths) as slices:
                async for last, rows in found:
                    if isinstance(view, ScreenView):
                        last = replace(last, slices=slices.poll_frames(last.shared_gangs))
                    view.show(last, rows)
                    if last.is_terminal:
                        break
        except (NotFound, Refused):
            return None  # the mesh was restarted, or has another job of that name
    return last


async def has_several_jobs(state: StateClient) -> bool:
    """Return True if more than one job of a mesh has not ended."""
    return sum(not row.is_terminal for row in await jobs.read_jobs(state)) > 1


def _watch_all(place: MeshPaths) -> int:
    """Show all jobs of a mesh until none is left or Ctrl-C; return the exit status of the worst
    end.
    """
    try:
        rows = asyncio.run(_show_mesh(place))
    except KeyboardInterrupt:
        print(f"\nthe mesh continues; `meshrl watch {format_path(place.root)}` shows it again")
        return EXIT_INTERRUPTED
    findings: list[Finding] = []
    for row in rows:
        print(f"{row.id}: {row.error or row.phase.replace('_', ' ')}; {row.run_dir}")
        found = _read_findings(row)
        print("".join(f"  {finding.line}\n" for finding in found), end="")
        findings += found
    phases = {row.phase for row in rows}
    if Phase.FAILED in phases:
        return EXIT_FAILED
    if not phases <= {Phase.FINISHED}:
        return EXIT_STOPPED
    return EXIT_NOT_LEARNED if has_failure(findings) else EXIT_FINISHED


def _read_findings(row: JobRow) -> tuple[Finding, ...]:
    """Return the findings about a finished job's steps, from the files of its run."""
    directory = Path(row.run_dir)
    if row.phase != Phase.FINISHED or not (directory / "job.json").is_file():
        return ()
    return read_outcome(read_run(directory), is_live=False).health


async def _show_mesh(place: MeshPaths) -> list[JobRow]:
    """Return the last rows of the jobs."""
    rows: list[JobRow] = []
    with make_mesh_view(str(place.root)) as view:
        found = poll_mesh(
            place, view.print_line, lambda state: MeshWatcher(state, str(place.root)).refresh
        )
        async with aclosing(found), SliceObserver(place) as slices:
            async for watcher in found:
                gangs = watcher.mesh.find_shared_gangs() if isinstance(view, ScreenView) else ()
                frame = watcher.build_frame(slices=slices.poll_frames(gangs))
                view.show(watcher.mesh, frame, watcher.elapsed_s)
                rows = list(watcher.mesh.jobs)
                if all(row.is_terminal for row in rows):
                    break
    return rows
