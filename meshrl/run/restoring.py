"""`job.json` of a run that is to go on, when it is damaged or gone: the copy in the run's Redis."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from common.base.errors import Damaged
from common.base.files import damage
from common.state import events
from common.state.redis.client import State
from meshrl.directory import job_file
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.claims import runs
from meshrl.directory.places import MeshPlace, shown


def record_of(directory: Path) -> dict[str, Any]:
    """What `job.json` holds, written again from Redis if need be; Damaged says what to do when
    Redis does not have it either.
    """
    run_dir = directory.absolute()
    path = run_dir / job_file.NAME
    try:
        return job_file.read(path)
    except FileNotFoundError:
        why = "it is gone"
    except Damaged as error:
        why = error.message
    place = _place_of(run_dir)
    about = {} if place.root == run_dir else {"mesh": str(place.root)}

    async def put_back(state: State) -> bool:
        told = await job_file.put_back(state, run_dir, about, why)
        if told is not None:
            print(damage.sentence(told), file=sys.stderr, flush=True)
            await events.append(state, damage.EVENT, told)
        return told is not None

    if place.redis.is_dir() and any(place.redis.iterdir()):
        if runs(place):
            known = ask(place, put_back, ANSWER_S)
        else:
            from meshrl.launch.head.launcher import Launcher  # only now is it needed
            from meshrl.launch.head.shape import MeshShape

            known = asyncio.run(Launcher(place, MeshShape()).ask_redis(put_back))
        if known:
            return job_file.read(path)
    raise Damaged(
        f"{path} is damaged: {why}; the run's Redis has no copy of it",
        fix=f"Put it back from a copy of the run. To start over: meshrl run JOB, which leaves "
        f"{shown(run_dir)} as it is",
    )


def _place_of(run_dir: Path) -> MeshPlace:
    """The mesh that the run was submitted to, which has its weights, or its own."""
    store = run_dir / "store"
    return MeshPlace(store.resolve().parent if store.is_symlink() else run_dir)
