"""Several jobs on one mesh under faults: in none of them may anything be lost or trained twice, and
each must learn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.base.errors import MeshError
from common.state import jobs
from loadtests.chaos.faults import RUN_S, Chaos, Report, continued
from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.jobs.plan import greedy
from meshrl.client.client import Client

WORKERS = 2  # for each job
LEARNT = 0.85  # held-out accuracy that each job must reach
AGAIN_S = 1.0  # between two questions to a mesh that may be without Redis


async def several(arguments: argparse.Namespace) -> dict[str, Any]:
    """The verdict on `arguments.jobs` jobs at once; a mesh whose jobs have all ended before all
    faults were made gets as many again.
    """
    kinds = arguments.faults.split(",")
    if set(kinds) - {"kill", "stop"}:
        raise SystemExit("with --jobs there are the faults kill and stop")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    summaries: dict[str, dict[str, Any]] = {}
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
    return verdict(mesh.root, summaries, disturbing.report, arguments)


async def _round(
    mesh: RunningMesh, arguments: argparse.Namespace, before: int
) -> dict[str, dict[str, Any]]:
    """Summaries of so many jobs more, by name; empty for one that did not finish."""
    names = [f"job{before + number}" for number in range(arguments.jobs)]
    for number, name in enumerate(names):
        changes = [f"seed={number}", *(arguments.set or [])]
        await _submitted(mesh, arguments.job, name, changes)
    return dict(zip(names, await asyncio.gather(*(_over(mesh, n) for n in names)), strict=True))


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
            print(f"submitting again: {error}", file=sys.stderr, flush=True)
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


def verdict(
    root: Path,
    summaries: dict[str, dict[str, Any]],
    report: Report,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One flat object; `ok` is what the exit status says."""
    first = min((fault["at"] for fault in report.faults), default=time.time())
    found = list(summaries.values())
    reached = {name: greedy(one) if one else 0.0 for name, one in summaries.items()}

    def total(key: str) -> int:
        return sum(int(one.get(key) or 0) for one in found)

    answer: dict[str, Any] = {
        "jobs": len(summaries),
        "faults": len(report.faults),
        "kills": sum(fault["fault"] == "kill" for fault in report.faults),
        "stops": sum(fault["fault"] == "stop" for fault in report.faults),
        "hit": ",".join(f"{fault['fault']}:{fault['name']}" for fault in report.faults),
        "completed": sum(one.get("phase") == jobs.Phase.FINISHED for one in found),
        "continued": sum(continued(root / name, first) for name in summaries),
        "lost": total("lost"),
        "trained_twice": total("trained_twice"),
        "typed_drops": total("typed_drops"),
        "held_out_greedy": min(reached.values(), default=None),
        **{f"held_out_greedy_{name}": share for name, share in reached.items()},
        "stalls_checked": len(report.named_s) + len(report.unnamed),
        "stalls_unnamed": ",".join(report.unnamed),
        "stall_named_s": round(max(report.named_s), 2) if report.named_s else None,
        "run": str(root),
    }
    answer["ok"] = int(
        answer["jobs"] > 0
        and answer["completed"] == answer["jobs"]
        and (answer["lost"], answer["trained_twice"], answer["typed_drops"]) == (0, 0, 0)
        and min(reached.values(), default=0.0) >= LEARNT
        and answer["continued"] >= 1
        and answer["faults"] == arguments.count
        and not report.unnamed
    )
    return answer
