"""The entry of a rollout shard's process."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.runtime.mesh import Mesh, MeshSettings, run
from services.rollout.shard import RolloutShard


async def main(shard: int) -> None:
    settings = MeshSettings.from_env()
    mesh = await Mesh.open(f"rollout/{shard}", "rollout", settings)
    actor = RolloutShard(mesh, Path(settings.run_root) / "mesh" / "logs")
    await mesh.join(actor, stats=actor.stats)
    try:
        await actor.serve()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, default=0)
    arguments = parser.parse_args()
    run(lambda: main(arguments.shard))
