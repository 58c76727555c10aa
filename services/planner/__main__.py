"""The entry of a planner's process."""

from __future__ import annotations

import argparse

from common.runtime.mesh import Mesh, MeshSettings, run
from services.planner.planner import Planner


async def main(name: str) -> None:
    mesh = await Mesh.open(name, "planner", MeshSettings.from_env())
    planner = Planner(mesh)
    await mesh.join(planner, stats=planner.stats)
    try:
        await planner.serve()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="planner/0")
    arguments = parser.parse_args()
    run(lambda: main(arguments.name))
