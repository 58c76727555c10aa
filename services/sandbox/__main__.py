"""Entry point of a sandbox: `python -m meshrl.services.sandbox --name sandbox/JOB/N`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from meshrl.common.mesh.instances.job_pauses import follow_job_pauses
from meshrl.common.mesh.instances.orphans import ORPHAN_OPTION_HELP, wait_until_orphaned
from meshrl.common.mesh.process.diagnosis import host_limits
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.state.pool.workers.process_names import parse_service_name
from meshrl.common.weights.store.job_files import find_local_modules
from meshrl.services.sandbox.actor import MeshServices, SandboxActor, SandboxIdentity
from meshrl.services.sandbox.outcomes import RedisExitReporter
from meshrl.services.sandbox.workers.calls import RLIMITS, PoolLimits


async def main(
    name: str,
    load_digest: str,
    warm_workers: int,
    max_workers: int,
    memory_mb: int,
    jails: int,
    orphan_s: float,
) -> None:
    settings = MeshSettings.from_env()
    _, job, _ = parse_service_name(name)
    mesh = await Mesh.open(name, "sandbox", settings, job)
    logs = Path(settings.run_root) / "mesh" / "logs"
    limits = PoolLimits(
        warm_workers=warm_workers,
        max_workers=max_workers,
        rlimits={**RLIMITS, "AS": memory_mb << 20},
    )
    ends = RedisExitReporter(mesh.state, mesh.clock, name, job)
    actor = SandboxActor(
        mesh.host,
        mesh.clock,
        logs,
        limits,
        SandboxIdentity(name, job, load_digest, jails),
        MeshServices(mesh.waits, ends, mesh.job_clock, partial(find_local_modules, mesh)),
    )
    await mesh.join(actor, stats=lambda: actor.stats().encode())
    mesh.ready = True
    try:
        async with follow_job_pauses(mesh, job):
            await wait_until_orphaned(mesh, orphan_s)
    finally:
        await mesh.leave()


if __name__ == "__main__":
    cores = host_limits.count_usable_cores()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="name of the sandbox, which serves one job")
    parser.add_argument(
        "--load", default="", help="digest of the only job document that may be loaded; empty: any"
    )
    parser.add_argument(
        "--warm", type=int, default=2, help="processes started when a job is loaded"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=max(4, cores),
        help="maximum of processes of a job while calls wait",
    )
    parser.add_argument(
        "--memory-mb", type=int, default=RLIMITS["AS"] >> 20, help="address space of each process"
    )
    parser.add_argument("--jails", type=int, default=4 * cores, help="maximum of concurrent jails")
    parser.add_argument("--orphan-s", type=float, default=0.0, help=ORPHAN_OPTION_HELP)
    args = parser.parse_args()
    run_service(
        lambda: main(
            args.name, args.load, args.warm, args.most, args.memory_mb, args.jails, args.orphan_s
        )
    )
