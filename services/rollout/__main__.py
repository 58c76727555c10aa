"""Entry point of a rollout shard process: `python -m meshrl.services.rollout --job JOB --shard
N`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshrl.common.mesh.instances.orphans import ORPHAN_OPTION_HELP, wait_until_orphaned
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.mesh.runtime.task_groups import run_first
from meshrl.common.state.pool.workers.process_names import shard_name
from meshrl.services.rollout.shard import RolloutShard


async def main(args: argparse.Namespace) -> None:
    name = shard_name(args.job, args.shard)
    mesh = await Mesh.open(name, "rollout", MeshSettings.from_env(), args.job)
    await serve(mesh, args.orphan_s)


async def serve(mesh: Mesh, orphan_s: float = 0.0) -> None:
    """Run a shard until its job has ended, it is orphaned, or it is cancelled."""
    actor = RolloutShard(mesh, Path(mesh.settings.run_root) / "mesh" / "logs")
    await mesh.join(actor, stats=actor.stats)
    try:
        await run_first([actor.serve(), wait_until_orphaned(mesh, orphan_s)])
    finally:
        await mesh.leave()


def create_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--job", required=True, help="job that the shard serves")
    found.add_argument("--shard", type=int, default=0, help="index of the shard in its job")
    found.add_argument("--orphan-s", type=float, default=0.0, help=ORPHAN_OPTION_HELP)
    return found


if __name__ == "__main__":
    arguments = create_parser().parse_args()
    run_service(lambda: main(arguments))
