"""The entry of a planner's process."""

from __future__ import annotations

import argparse

from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.services.planner.planner import Planner


async def main(a: argparse.Namespace) -> None:
    await serve(await Mesh.open(a.name, "planner", MeshSettings.from_env()))


async def serve(mesh: Mesh) -> None:
    """The life of a planner, until it is cancelled."""
    planner = Planner(mesh)
    await mesh.join(planner, stats=lambda: planner.stats().encoded())
    try:
        await planner.serve()
    finally:
        await mesh.leave()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--name", default="planner/0")
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
