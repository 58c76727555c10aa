"""Entry point of a planner process."""

from __future__ import annotations

import argparse

from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.services.planner.planner import Planner


async def main(arguments: argparse.Namespace) -> None:
    await run_planner(await Mesh.open(arguments.name, "planner", MeshSettings.from_env()))


async def run_planner(mesh: Mesh) -> None:
    """Run a planner until cancellation."""
    planner = Planner(mesh)
    await mesh.join(planner, stats=lambda: planner.stats().encode())
    try:
        await planner.serve()
    finally:
        await mesh.leave()


def build_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--name", default="planner/0")
    return found


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    run_service(lambda: main(arguments))
