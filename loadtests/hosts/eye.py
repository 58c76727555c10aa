"""Observer of a mesh at its head, which prints each snapshot as a line of JSON until it is killed.

Usage:

    python -m loadtests.hosts.eye ROOT

`loadtests.hosts.mesh` starts it in the head's namespaces.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests.jobs.mesh import workers_by_job
from loadtests.measuring.entry import print_progress
from meshrl.common.base.errors import MeshError
from meshrl.common.state import leader
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.view.mesh.mesh_snapshot import read_writable_snapshot
from meshrl.view.mesh.stalls import diagnose_stalls

LOOK_S = 0.4
PLANNER = "planner"  # the election that planners stand for
ABOUT = ("name", "kind", "host", "incarnation", "token")
PUBLISHED = ("job", "tokens", "paced", "late")  # stats of role processes


@dataclass(frozen=True)
class HostsSnapshot:
    """Snapshot of a mesh at one time.

    `processes` are the live ones, each with name, kind, host, incarnation and published values;
    `stalls` are processes that block others.
    """

    at: float  # wall clock
    processes: list[dict[str, Any]]
    jobs: list[dict[str, Any]]  # name, phase, step
    held: dict[str, float]  # workers by job
    leader: str
    token: int
    stalls: list[dict[str, Any]]


async def take_snapshot(state: StateClient) -> HostsSnapshot:
    """Read a snapshot of the mesh; MeshError if Redis does not answer."""
    mesh = await read_writable_snapshot(state)
    owner, token = await leader.read_leader(state, PLANNER)
    names = {entry.name: entry.host for entry in mesh.entries}
    return HostsSnapshot(
        time.time(),
        [
            {key: getattr(entry, key) for key in ABOUT}
            | {"stats": {key: entry.stats[key] for key in PUBLISHED if key in entry.stats}}
            for entry in mesh.entries
            if entry.alive
        ],
        [{"name": row.id, "phase": row.phase, "step": row.steps_done} for row in mesh.jobs],
        workers_by_job(list(mesh.gangs)),
        owner,
        token,
        [
            {"host": names.get(stall.culprit, ""), **asdict(stall)}
            for stall in diagnose_stalls(mesh)
        ],
    )


async def main(root: Path) -> None:
    state = await StateClient.open(MeshPaths(root).redis_url)
    while True:
        try:
            print(json.dumps(asdict(await take_snapshot(state))), flush=True)
        except MeshError as error:
            print_progress(f"eye: {error}")
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
