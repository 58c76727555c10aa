"""`meshrl watch` of a mesh with several jobs: all of them, until the last one has ended."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from common.state import jobs
from common.state.jobs import JobRow, Phase
from common.state.redis.client import State
from meshrl.directory.asking import ask
from meshrl.directory.places import MeshPlace, shown
from meshrl.directory.target import may_live
from meshrl.run.following.looking import looks
from meshrl.run.outcome import FAILED, FINISHED, INTERRUPTED, STOPPED
from meshrl.view.frames.watcher import MeshWatcher
from meshrl.view.live.mesh_view import view_for
from meshrl.view.recording.recorder import ANSWER_S


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
    rows: list[JobRow] = []
    with view_for(str(place.root)) as view:
        found = looks(place, view, lambda state: MeshWatcher(state, str(place.root)).watch)
        async with aclosing(found):
            async for watcher in found:
                view.show(watcher.mesh, watcher.frame(), watcher.elapsed_s)
                rows = list(watcher.mesh.jobs)
                if all(row.ended for row in rows):
                    break
    return rows
