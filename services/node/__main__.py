"""The entry of a host's agent: `python -m services.node --workers 3`."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from common.runtime.mesh import Mesh, MeshSettings, run
from services.node.accelerators import discover
from services.node.agent import NodeAgent
from services.node.roles import with_overrides
from services.node.worker import ORPHAN_S


async def main(a: argparse.Namespace) -> None:
    settings = MeshSettings.from_env()
    with_overrides(a.role_command)  # a mistake in them is said here, not by every worker
    await serve(await Mesh.open(f"node/{settings.host}", "node", settings), a)


async def serve(mesh: Mesh, a: argparse.Namespace) -> None:
    """The life of an agent, until it is cancelled."""
    scratch = Path(mesh.settings.run_root) / "mesh"
    accelerators = await discover(mesh.host, a.device, a.workers, scratch)
    options = ["--orphan-s", str(a.orphan_s)]
    for command in a.role_command:
        options += ["--role-command", command]
    agent = NodeAgent(mesh, accelerators, options, a.gang_prefix, a.ranks)
    await mesh.join(agent, stats=agent.stats)
    mesh.ready = True
    try:
        await asyncio.Event().wait()
    finally:
        await mesh.leave()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--workers", type=int, default=0, help="slots; 0 with cuda: one a GPU")
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--ranks", type=int, default=1, help="workers of the first gang")
    found.add_argument("--gang-prefix", default="g", help="unique to this host in the mesh")
    found.add_argument(
        "--role-command",
        action="append",
        default=os.environ.get("MESHRL_ROLE_COMMANDS", "").splitlines(),
        metavar="ROLE=COMMAND",
        help="what workers start for a role, in place of ours; gets --gang --job --epoch [--core]; "
        "also a line each in $MESHRL_ROLE_COMMANDS",
    )
    found.add_argument(
        "--orphan-s", type=float, default=ORPHAN_S, help="workers without an agent end after"
    )
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
