"""The entry of a host's agent: `python -m meshrl.services.node --workers 3`."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from typing import Any

from meshrl.common.mesh.residents.orphan import ORPHAN_S
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.common.state.pool.placing.taking import ALL, taken
from meshrl.common.weights.store import host_chunks
from meshrl.services.node.agent import NodeAgent
from meshrl.services.node.gpus.accelerators import discover
from meshrl.services.node.residents.roles import with_overrides
from meshrl.services.node.worker import budget_options, market_option


async def main(a: argparse.Namespace) -> None:
    settings = MeshSettings.from_env()
    with_overrides(a.role_command)  # a mistake in them is said here, not by every worker
    await serve(await Mesh.open(f"node/{settings.host}", "node", settings), a)


async def serve(mesh: Mesh, a: argparse.Namespace) -> None:
    found = await discover(mesh.host, a.device, a.workers, a.stand_for)
    accelerators = [replace(one, bytes=a.accelerator_bytes or one.bytes) for one in found]
    options = ["--orphan-s", str(a.orphan_s), "--market", a.market]
    options += ["--memory-bytes", str(a.memory_bytes), "--disk-bytes", str(a.disk_bytes)]
    for command in a.role_command:
        options += ["--role-command", command]
    orphan = ["--orphan-s", str(a.orphan_s)]
    agent = NodeAgent(mesh, accelerators, options, a.worker_prefix, orphan, a.services)
    bulk = host_chunks.serve_cache(mesh)

    def stats() -> dict[str, Any]:
        found = replace(agent.stats(), bulk_sent=None if bulk is None else bulk.sent)
        return found.encoded() | agent.gpus.stats()

    try:
        await mesh.join(agent, stats=stats, bulk_address="" if bulk is None else bulk.address)
        mesh.ready = True
        await asyncio.Event().wait()
    finally:
        if bulk is not None:
            bulk.close()
        await agent.leave()  # it has more to wait for than the stop of an actor may take
        await mesh.leave()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--workers", type=int, default=0, help="slots; 0 with cuda: one a GPU")
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--worker-prefix", default="w", help="unique to this host in the mesh")
    found.add_argument(
        "--services", type=taken, default=ALL, help="that may be placed here, or none"
    )
    found.add_argument(
        "--stand-for",
        type=lambda text: [kind for kind in text.split(",") if kind],
        default=os.environ.get("MESHRL_STAND_FOR", ""),
        metavar="KIND,...",
        help="accelerators that the first CPU slots stand for, at the pace that a job declares; "
        "also in $MESHRL_STAND_FOR",
    )
    market_option(found)
    budget_options(found)
    found.add_argument(
        "--role-command",
        action="append",
        default=os.environ.get("MESHRL_ROLE_COMMANDS", "").splitlines(),
        metavar="ROLE=COMMAND",
        help="what workers start for a role, in place of ours; gets the options of "
        "common/state/pool/workers/seat.py; also a line each in $MESHRL_ROLE_COMMANDS",
    )
    found.add_argument(
        "--orphan-s", type=float, default=ORPHAN_S, help="workers without an agent end after"
    )
    return found


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
