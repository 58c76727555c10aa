"""Chaos test that kills processes of a running mesh, corrupts files, fills its disk, and checks for
losses.

Usage:

    python -m loadtests.chaos examples/calculator.toml --faults kill,stop --count 10 --seed 1
    python -m loadtests.chaos examples/calculator.toml --faults kill,stop,damage,full --seed 1
    python -m loadtests.chaos examples/calculator.toml --jobs 2 --faults kill,stop --count 12
    python -m loadtests.chaos examples/calculator.toml --jobs 2 --workers 2 --faults kill,stop

Every few seconds one process gets SIGKILL, or SIGSTOP and, once its lease has expired, SIGCONT:
services, planners, workers, role processes, environment processes, the agent, Redis, the fork
server; never the launcher. While one is stopped, `meshrl status --stalled` must name it. Or a
durable file loses a bit, its end or all, and its readers are killed; or the run's disk, a tmpfs of
its own (which needs root), is full for some seconds. A run that has finished before
all faults were made gets more steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtests.chaos.faults import RUN_S, Chaos, run
from loadtests.chaos.verdict import verdict
from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.entry import options, print_progress, report
from loadtests.measuring.processes import beside
from meshrl.client.client import Client
from meshrl.common.base.errors import MeshError
from meshrl.common.state import jobs

WORKERS = 2  # for each job, by default
AGAIN_S = 1.0  # between two questions to a mesh that may be without Redis


async def several(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run jobs at once, and as many again while faults are left to make; return the verdict."""
    kinds = arguments.faults.split(",")
    if set(kinds) - {"kill", "stop"}:
        raise SystemExit("with --jobs there are the faults kill and stop")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    summaries: dict[Path, dict[str, Any]] = {}
    async with mesh_up(folder, arguments.workers or WORKERS * arguments.jobs) as mesh:
        disturbing = Chaos(mesh.root, arguments.seed, kinds, arguments.count)
        try:
            async with beside(disturbing.wreak()) as faults, asyncio.timeout(RUN_S):
                while not summaries or not faults.done():
                    names = [f"job{len(summaries) + number}" for number in range(arguments.jobs)]
                    for number, name in enumerate(names):
                        changes = [f"seed={number}", *(arguments.set or [])]
                        await _submitted(mesh, arguments.job, name, changes)
                    ended = await asyncio.gather(*(_await_summary(mesh, name) for name in names))
                    summaries.update(zip((mesh.root / name for name in names), ended, strict=True))
                faults.result()
        except TimeoutError:
            print("the jobs hang", file=sys.stderr)
    return verdict(summaries, disturbing.report, arguments.count)


async def _submitted(mesh: RunningMesh, job: Path, name: str, changes: list[str]) -> None:
    """Submit a job and retry while Redis is unreachable; an already accepted job is no error."""
    words = [f"name={name}", f"out={mesh.root / name}", *changes]
    while True:
        try:
            async with Client(mesh.root) as client:
                if name not in [state.name for state in await client.jobs()]:
                    await client.submit(job, words)
                return
        except MeshError as error:
            if not error.retryable:
                raise
            print_progress(f"submitting again: {error}")
        await asyncio.sleep(AGAIN_S)


async def _await_summary(mesh: RunningMesh, name: str) -> dict[str, Any]:
    path = mesh.root / name / "summary.json"
    while True:
        try:
            async with Client(mesh.root) as client:
                told = await client.job(name)
            if told.over and path.exists():
                return json.loads(path.read_text()) if told.phase == jobs.Phase.FINISHED else {}
        except MeshError:
            pass  # Redis is away, or starts
        await asyncio.sleep(AGAIN_S)


def main() -> None:
    parser = options(
        __doc__,
        faults="kill,stop",
        count=10,
        seed=1,
        out=(Path, "run directory; default: a temporary one"),
        jobs=(1, "of different seeds, on one mesh"),
        workers=(0, "of the mesh of several jobs, which share too few by time slices; 0: 2 each"),
    )
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", help="KEY=VALUE of the job")
    arguments = parser.parse_args()
    answer = asyncio.run((several if arguments.jobs > 1 else run)(arguments))
    report(answer)
    sys.exit(0 if answer["ok"] else 1)


if __name__ == "__main__":
    main()
