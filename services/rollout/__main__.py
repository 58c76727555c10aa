"""The entry of a rollout shard's process."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.runtime.mesh import Mesh, MeshSettings, run
from services.rollout.shard import RolloutShard


async def main(a: argparse.Namespace) -> None:
    await serve(await Mesh.open(f"rollout/{a.shard}", "rollout", MeshSettings.from_env()))


async def serve(mesh: Mesh) -> None:
    """The life of a shard, until it is cancelled."""
    actor = RolloutShard(mesh, Path(mesh.settings.run_root) / "mesh" / "logs")
    await mesh.join(actor, stats=actor.stats)
    try:
        await actor.serve()
    finally:
        await mesh.leave()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--shard", type=int, default=0)
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
