"""Chaos of spot workers: bursts in which up to all of them vanish at once."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtests.chaos.faults import GAP_S, RUN_S, audit_runs
from loadtests.chaos.several_jobs import await_summary, submit
from loadtests.chaos.verdict import Report, verdict
from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.entry import print_progress
from loadtests.spot.hosts import NOTICE_S, SpotHosts, spot_hosts
from meshrl.common.base.errors import MeshError
from meshrl.common.state import jobs

RESERVED = 2  # workers, by default
# kinds of each twelve bursts: without notice, after one, and a notice without an end
KINDS = ("kill",) * 5 + ("notice",) * 4 + ("withdrawn",) * 3
ALL_SHARE = 1 / 3  # of the bursts: they hit all spot workers
WITHDRAWN_S = 120.0  # until the announced end of a notice that is withdrawn
POLL_S = 0.5


async def run_markets(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run jobs in sequence until all bursts are made; return the verdict."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    summaries: dict[Path, dict[str, Any]] = {}
    report = Report()
    async with (
        mesh_up(folder, arguments.workers or RESERVED, "--listen", "127.0.0.1") as mesh,
        spot_hosts(folder, mesh.root, 0.0, arguments.seed) as spot,
    ):
        await spot.join(arguments.spot)
        try:
            async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
                bursts = tasks.create_task(_make_bursts(mesh, spot, report, arguments))
                while not summaries or not bursts.done():
                    name = f"job{len(summaries)}"
                    # Jobs of the same seed have the same warm start, which is cached.
                    await submit(mesh, arguments.job, name, arguments.set or [])
                    summaries[mesh.root / name] = await await_summary(mesh, name)
        except TimeoutError:
            print("the jobs hang", file=sys.stderr)
        killed = sum(host.killed_s > 0 for host in spot.hosts)
    answer = verdict(summaries, report, arguments.count, await audit_runs(summaries))
    host = {key: mesh.watched.host[key] for key in ("host_cores", "steal_cores", "load")}
    return answer | {
        "notices": report.count_faults("notice"),
        "withdrawn": report.count_faults("withdrawn"),
        "bursts_of_all": sum(one["of_all"] for one in report.faults),
        "hosts_killed": killed,
        **host,
    }


async def _make_bursts(
    mesh: RunningMesh, spot: SpotHosts, report: Report, arguments: argparse.Namespace
) -> None:
    """Make the bursts while jobs train; vanished hosts are replaced after each."""
    random, kinds = spot.random, list[str]()
    while len(report.faults) < arguments.count:
        await _await_training(mesh)
        await asyncio.sleep(random.uniform(*GAP_S))
        if not await _is_training(mesh):
            continue
        kinds = kinds or random.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        most = len(spot.running)
        count = most if random.random() < ALL_SHARE else random.randint(1, most)
        victims = random.sample(spot.running, count)
        print_progress(f"{kind}: {count} of {most} spot workers")
        at = time.time()
        if kind == "withdrawn":
            for host in victims:
                host.announce_end(WITHDRAWN_S)
            await asyncio.sleep(NOTICE_S)
            for host in victims:
                host.withdraw_notice()
        else:
            await asyncio.gather(*(spot.vanish(host, kind == "notice") for host in victims))
        report.faults.append(
            {"fault": kind, "name": f"{count} of {most}", "job": "", "at": at}
            | {"until": time.time(), "of_all": count == most}
        )
        await spot.join(arguments.spot - len(spot.present))


async def _await_training(mesh: RunningMesh) -> None:
    while not await _is_training(mesh):  # until this task is ended
        await asyncio.sleep(POLL_S)


async def _is_training(mesh: RunningMesh) -> bool:
    try:
        rows = await jobs.read_jobs(mesh.state)
    except MeshError:
        return False
    return any(row.phase == jobs.Phase.TRAINING for row in rows)
