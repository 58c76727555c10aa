"""`meshrl watch`: the view of a run that another process carries on. Nothing is written."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.base.errors import HistoryLost, NotFound, Refused
from common.base.files import lines
from common.state import events, steps
from common.state.redis.client import State
from meshrl.directory.places import read_if_whole
from meshrl.directory.target import Run, may_live, mesh_meant, row_of, run_of
from meshrl.run.following import watching_mesh
from meshrl.run.following.looking import looks
from meshrl.run.outcome import INTERRUPTED, RunOutcome, outcome_of
from meshrl.view.history.belonging import Belonging
from meshrl.view.history.run_snapshot import RunHistory, RunReading, RunSnapshot, snapshot
from meshrl.view.live.view import view_for
from meshrl.view.mesh.snapshot import read_mesh
from meshrl.view.recording.evaluations import evaluated, last_standing_step
from meshrl.view.recording.recorded import RECENT, last_step, read_events


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
            evaluations=list({e.fields["tag"]: e.fields for e in self._evaluated}.values()),
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
    if place is not None and watching_mesh.is_of_several(place):
        return watching_mesh.watch(place)
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
    found = outcome_of(run) if last is None or not last.over else _seen(run, last)
    print("\n".join(found.lines()))
    return found.status


def _seen(run: Run, last: RunSnapshot) -> RunOutcome:
    """How the run ended; who records it may not have written that down yet."""
    return replace(
        outcome_of(run, live=False),
        state=last.phase.value,
        phase=last.phase.value,
        step=last.step,
        reward=last.rewards[-1] if last.rewards else None,
        error=last.error,
    )


async def _watch(run: Run) -> RunSnapshot | None:
    """The run when it was over, or as it was seen last; None if it was never seen."""
    last: RunSnapshot | None = None
    with view_for(run.directory) as view:
        found = looks(run.place, view, lambda state: Onlooker(state, run).watch)
        try:
            async with aclosing(found):
                async for last, rows in found:
                    view.show(last, rows)
                    if last.over:
                        break
        except (NotFound, Refused):
            return None  # the mesh was started anew, or has another job of that name
    return last
