"""Several jobs on one mesh under faults: in none of them may anything be lost or trained twice, and
each must learn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtests.chaos.faults import RUN_S, Chaos
from loadtests.chaos.verdict import verdict
from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.entry import tell
from meshrl.client.client import Client
from meshrl.common.base.errors import MeshError
from meshrl.common.state import jobs

WORKERS = 2  # for each job
AGAIN_S = 1.0  # between two questions to a mesh that may be without Redis


async def several(arguments: argparse.Namespace) -> dict[str, Any]:
    """The verdict on `arguments.jobs` jobs at once; a mesh whose jobs have all ended before all
    faults were made gets as many again.
    """
    kinds = arguments.faults.split(",")
    if set(kinds) - {"kill", "stop"}:
        raise SystemExit("with --jobs there are the faults kill and stop")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    summaries: dict[Path, dict[str, Any]] = {}
    async with mesh_up(folder, WORKERS * arguments.jobs) as mesh:
        disturbing = Chaos(mesh.root, arguments.seed, kinds, arguments.count)
        faults = asyncio.create_task(disturbing.wreak())
        try:
            async with asyncio.timeout(RUN_S):
                while not summaries or not faults.done():
                    summaries |= await _round(mesh, arguments, len(summaries))
            faults.result()
        except TimeoutError:
            print("the jobs hang", file=sys.stderr)
        finally:
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
    return verdict(summaries, disturbing.report, arguments.count)


async def _round(
    mesh: RunningMesh, arguments: argparse.Namespace, before: int
) -> dict[Path, dict[str, Any]]:
    """Summaries of so many jobs more, by run; empty for one that did not finish."""
    names = [f"job{before + number}" for number in range(arguments.jobs)]
    for number, name in enumerate(names):
        changes = [f"seed={number}", *(arguments.set or [])]
        await _submitted(mesh, arguments.job, name, changes)
    ended = await asyncio.gather(*(_over(mesh, name) for name in names))
    return {mesh.root / name: summary for name, summary in zip(names, ended, strict=True)}


async def _submitted(mesh: RunningMesh, job: Path, name: str, changes: list[str]) -> None:
    """Submits a job, again where Redis was away; one that was taken all the same is no error."""
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
            tell(f"submitting again: {error}")
        await asyncio.sleep(AGAIN_S)


async def _over(mesh: RunningMesh, name: str) -> dict[str, Any]:
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
