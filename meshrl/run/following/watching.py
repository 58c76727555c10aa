"""`meshrl watch`: the view of a run that another process carries on, or of a mesh with several jobs
until the last one has ended. Nothing is written.
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
from meshrl.common.base.files import lines
from meshrl.common.state import events, jobs, steps
from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.redis.client import State
from meshrl.directory.asking import ask
from meshrl.directory.places import MeshPlace, read_if_whole, shown
from meshrl.directory.target import Run, may_live, mesh_meant, row_of, run_of
from meshrl.run.following.looking import looks
from meshrl.run.outcome import FAILED, FINISHED, INTERRUPTED, STOPPED, outcome_of
from meshrl.view.history.belonging import Belonging
from meshrl.view.history.run_snapshot import (
    RunHistory,
    RunReading,
    RunSnapshot,
    evaluations_of,
    snapshot,
)
from meshrl.view.live.mesh_view import mesh_view_for
from meshrl.view.live.view import view_for
from meshrl.view.mesh.frames import MeshWatcher
from meshrl.view.mesh.snapshot import read_mesh
from meshrl.view.recording.recorded import (
    RECENT,
    evaluated,
    last_standing_step,
    last_step,
    read_events,
)
from meshrl.view.recording.recorder import ANSWER_S


class Onlooker:
    """Looks at a run through the Redis of its mesh, beside who records it: what is recorded is read
    from the files, as Redis may have let go of it.
    """

    def __init__(self, state: State, run: Run) -> None:
        self._state, self._run = state, run
        self.rows = list(deque(lines.whole(run.directory / "metrics.jsonl"), maxlen=RECENT))
        self._history, self._last_event = RunHistory(), "0"
        self._evaluated: list[events.Event] = []
        self._recorded: list[events.Event] | None = read_events(run.directory)
        self._belonging = Belonging(run.job)

    async def look(self) -> RunSnapshot:
        """The run now; NotFound or Refused when the mesh has it no more."""
        state, run = self._state, self._run
        row = await row_of(state, run)
        new = await self._new_events()
        mine = [event for event in new if self._belonging.takes(event)]
        if new:
            self._last_event = new[-1].id
        last = last_standing_step(row.steps_done, mine, run.job)
        self.rows = [r for r in self.rows[-RECENT:] if r["step"] <= last]
        self.rows += await steps.step_rows(state, run.job, since=last_step(self.rows))
        self._evaluated = evaluated([*self._evaluated, *mine], run.job)
        reading = RunReading(
            at=elapsed_s(run.directory),
            job=row,
            rows=self.rows,
            mesh=await read_mesh(state),
            evaluations=evaluations_of(self._evaluated),
            events=mine,
        )
        return snapshot(reading, self._history)

    async def watch(self) -> tuple[RunSnapshot, list[dict[str, Any]]]:
        """The run now, and the rows of its steps."""
        return await self.look(), self.rows

    async def _new_events(self) -> list[events.Event]:
        """What has happened since the last look; at first all that is recorded. Where events are
        gone a line says so.
        """
        recorded, self._recorded = self._recorded or [], None
        if recorded:
            self._last_event = recorded[-1].id
        try:
            return recorded + await events.read_all(self._state, self._last_event)
        except HistoryLost as lost:
            self._history.alerts.append(str(lost))
            self._last_event = lost.through
            return recorded + await events.read_all(self._state, self._last_event)


def elapsed_s(run_dir: Path) -> float:
    """Seconds of wall time of a run, as who records it counts them."""
    path = run_dir / "usage.json"
    held = read_if_whole(path)
    if "wall_s" not in held:
        return 0.0
    return float(held["wall_s"]) + max(0.0, time.time() - path.stat().st_mtime)


def watch(chosen: Path | None, mesh: Path | None) -> int:
    """Shows the run until it is over or Ctrl-C; the exit status says how it ended. Of a mesh that
    works on several jobs, all of them.
    """
    place = mesh_meant(chosen, mesh)
    if place is not None and may_live(place) and ask(place, several, ANSWER_S):
        return _watch_all(place)
    run = run_of(chosen, mesh)
    if not may_live(run.place):
        found = outcome_of(run, live=False)
        print("\n".join(found.lines()))
        return found.status
    try:
        last = asyncio.run(_watch(run))
    except KeyboardInterrupt:
        print(f"\n{run.job} goes on; `meshrl watch {run.shown}` shows it again")
        return INTERRUPTED
    if last is None or not last.over:
        found = outcome_of(run)
    else:  # the recorder may not have written the end down yet
        found = replace(
            outcome_of(run, live=False),
            state=last.phase.value,
            phase=last.phase.value,
            step=last.step,
            reward=last.rewards[-1] if last.rewards else None,
            error=last.error,
        )
    print("\n".join(found.lines()))
    return found.status


async def _watch(run: Run) -> RunSnapshot | None:
    """The run when it was over, or as it was seen last; None if it was never seen."""
    last: RunSnapshot | None = None
    with view_for(run.directory) as view:
        found = looks(run.place, view.say, lambda state: Onlooker(state, run).watch)
        try:
            async with aclosing(found):
                async for last, rows in found:
                    view.show(last, rows)
                    if last.over:
                        break
        except (NotFound, Refused):
            return None  # the mesh was started anew, or has another job of that name
    return last


async def several(state: State) -> bool:
    """Whether more than one job of a mesh goes on."""
    return sum(not row.ended for row in await jobs.jobs(state)) > 1


def _watch_all(place: MeshPlace) -> int:
    """Shows all jobs of a mesh until none is left or Ctrl-C; the exit status of the worst end."""
    try:
        rows = asyncio.run(_watch_mesh(place))
    except KeyboardInterrupt:
        print(f"\nthe mesh goes on; `meshrl watch {shown(place.root)}` shows it again")
        return INTERRUPTED
    for row in rows:
        print(f"{row.id}: {row.error or row.phase.replace('_', ' ')}; {row.run_dir}")
    phases = {row.phase for row in rows}
    if Phase.FAILED in phases:
        return FAILED
    return FINISHED if phases <= {Phase.FINISHED} else STOPPED


async def _watch_mesh(place: MeshPlace) -> list[JobRow]:
    """The jobs as they were when they were seen last."""
    rows: list[JobRow] = []
    with mesh_view_for(str(place.root)) as view:
        found = looks(place, view.say, lambda state: MeshWatcher(state, str(place.root)).watch)
        async with aclosing(found):
            async for watcher in found:
                view.show(watcher.mesh, watcher.frame(), watcher.elapsed_s)
                rows = list(watcher.mesh.jobs)
                if all(row.ended for row in rows):
                    break
    return rows
