"""The entry of a sandbox: `python -m meshrl.services.sandbox --name sandbox/JOB/N`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from meshrl.common.mesh.process.ends import limits
from meshrl.common.mesh.residents.orphan import ORPHAN, until_orphaned
from meshrl.common.mesh.residents.pausing import stands_while_paused
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.common.state.pool.workers.names import service
from meshrl.common.weights.store.local_files import modules_here
from meshrl.services.sandbox.actor import MeshParts, SandboxActor, ServedSandbox
from meshrl.services.sandbox.outcomes import ToldEnds
from meshrl.services.sandbox.workers.calls import RLIMITS, PoolLimits


async def main(
    name: str, load: str, warm: int, most: int, memory_mb: int, jails: int, orphan_s: float
) -> None:
    settings = MeshSettings.from_env()
    _, job, _ = service(name)
    mesh = await Mesh.open(name, "sandbox", settings, job)
    logs = Path(settings.run_root) / "mesh" / "logs"
    limits = PoolLimits(warm=warm, most=most, rlimits={**RLIMITS, "AS": memory_mb << 20})
    ends = ToldEnds(mesh.state, mesh.clock, name, job)
    actor = SandboxActor(
        mesh.host,
        mesh.clock,
        logs,
        limits,
        ServedSandbox(name, job, load, jails),
        MeshParts(mesh.waits, ends, mesh.job_clock, partial(modules_here, mesh)),
    )
    await mesh.join(actor, stats=lambda: actor.stats().encoded())
    mesh.ready = True
    try:
        async with stands_while_paused(mesh, job):
            await until_orphaned(mesh, orphan_s)
    finally:
        await mesh.leave()


if __name__ == "__main__":
    cores = limits.cores()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of a sandbox of the one job that it serves")
    parser.add_argument(
        "--load", default="", help="digest of what it may load; none: what it is told"
    )
    parser.add_argument("--warm", type=int, default=2, help="processes started with a job")
    parser.add_argument(
        "--most", type=int, default=max(4, cores), help="processes of a job when calls wait"
    )
    parser.add_argument(
        "--memory-mb", type=int, default=RLIMITS["AS"] >> 20, help="address space of each process"
    )
    parser.add_argument("--jails", type=int, default=4 * cores, help="jails that run at a time")
    parser.add_argument("--orphan-s", type=float, default=0.0, help=ORPHAN)
    a = parser.parse_args()
    run(lambda: main(a.name, a.load, a.warm, a.most, a.memory_mb, a.jails, a.orphan_s))
