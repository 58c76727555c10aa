"""The entry of the sandbox: `python -m services.sandbox`."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from common.runtime.mesh import Mesh, MeshSettings, run
from services.sandbox.actor import SandboxActor
from services.sandbox.ends import ToldEnds
from services.sandbox.workers.pool import RLIMITS, PoolLimits


async def main(name: str, warm: int, most: int, memory_mb: int, jails: int) -> None:
    settings = MeshSettings.from_env()
    mesh = await Mesh.open(name, "sandbox", settings)
    logs = Path(settings.run_root) / "mesh" / "logs"
    limits = PoolLimits(warm=warm, most=most, rlimits={**RLIMITS, "AS": memory_mb << 20})
    ends = ToldEnds(mesh.state, mesh.clock, name)
    actor = SandboxActor(
        mesh.host, mesh.clock, logs, limits, name=name, slots=jails, waits=mesh.waits, ends=ends
    )
    await mesh.join(actor, stats=actor.stats)
    mesh.ready = True
    try:
        await asyncio.Event().wait()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="sandbox/0")
    parser.add_argument("--warm", type=int, default=2, help="processes started with a job")
    parser.add_argument(
        "--most", type=int, default=max(4, cores), help="processes of a job when calls wait"
    )
    parser.add_argument(
        "--memory-mb", type=int, default=RLIMITS["AS"] >> 20, help="address space of each process"
    )
    parser.add_argument(
        "--jails", type=int, default=4 * cores, help="jails that run at a time, of all jobs"
    )
    a = parser.parse_args()
    run(lambda: main(a.name, a.warm, a.most, a.memory_mb, a.jails))
