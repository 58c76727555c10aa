"""`meshrl watch` of a mesh with several jobs: all of them, until the last one has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from common.state import jobs, registry, steps
from common.state.client import State
from common.state.jobs import JobRow, Phase
from meshrl.directory.asking import ask
from meshrl.directory.places import MeshPlace, shown
from meshrl.directory.target import may_live
from meshrl.run.following.looking import looked
from meshrl.run.outcome import FAILED, FINISHED, INTERRUPTED, STOPPED
from meshrl.view.history.run_snapshot import History
from meshrl.view.live.mesh_view import CURVE, MeshShot, shot, view_for
from meshrl.view.mesh.pool import pool
from meshrl.view.recording.recorder import ANSWER_S


class MeshOnlooker:
    """Looks at all jobs of a mesh that go on, and at those that have ended since it began."""

    def __init__(self, state: State) -> None:
        self._state, self._began = state, time.monotonic()
        self._shown: set[str] = set()
        self.steps: dict[str, list[dict[str, object]]] = {}  # the last rows of each job
        self._histories: dict[str, History] = {}

    async def look(self) -> MeshShot:
        """The mesh now. StateUnavailable, DeadlineExceeded."""
        state = self._state
        rows = [row for row in await jobs.jobs(state) if not row.ended or row.id in self._shown]
        for row in rows:
            if not row.ended or row.id not in self.steps:
                await self._follow(row)
        self._shown |= {row.id for row in rows}
        return shot(
            time.monotonic() - self._began,
            rows,
            self.steps,
            await registry.entries(state),
            await pool(state),
            self._histories,
        )

    async def _follow(self, row: JobRow) -> None:
        """The last rows of a job's steps; those that a new lineage has left behind are gone."""
        known = [r for r in self.steps.get(row.id, []) if int(str(r["step"])) <= row.steps_done]
        last = int(str(known[-1]["step"])) if known else max(0, row.steps_done - CURVE)
        if last < row.steps_done:
            known += await steps.step_rows(self._state, row.id, since=last)
        self.steps[row.id] = known[-CURVE:]


async def several(state: State) -> bool:
    """Whether more than one job of a mesh goes on."""
    return sum(not row.ended for row in await jobs.jobs(state)) > 1


def is_of_several(place: MeshPlace) -> bool:
    """Whether there is a mesh that works on more than one job."""
    return may_live(place) and ask(place, several, ANSWER_S)


def watch(place: MeshPlace) -> int:
    """Shows all jobs of a mesh until none is left or Ctrl-C; the exit status of the worst end."""
    try:
        rows = asyncio.run(_watch(place))
    except KeyboardInterrupt:
        print(f"\nthe mesh goes on; `meshrl watch {shown(place.root)}` shows it again")
        return INTERRUPTED
    for row in rows:
        print(f"{row.id}: {row.error or row.phase.replace('_', ' ')}; {row.run_dir}")
    phases = {row.phase for row in rows}
    if Phase.FAILED in phases:
        return FAILED
    return FINISHED if phases <= {Phase.FINISHED} else STOPPED


async def _watch(place: MeshPlace) -> list[JobRow]:
    """The jobs as they were when they were seen last."""
    with view_for(str(place.root)) as view:

        def looking(state: State) -> Callable[[], Awaitable[tuple[list[JobRow], bool]]]:
            onlooker = MeshOnlooker(state)

            async def look() -> tuple[list[JobRow], bool]:
                now = await onlooker.look()
                view.show(now)
                rows = [line.row for line in now.jobs]
                return rows, all(row.ended for row in rows)

            return look

        return await looked(place, view, looking, [])
