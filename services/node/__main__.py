"""Entry point of a host's agent: `python -m meshrl.services.node --workers 3`."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from typing import Any

from meshrl.common.mesh.instances.orphans import ORPHAN_TIMEOUT_S
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.state.pool.scheduling.host_services import ALL_SERVICES, parse_services
from meshrl.common.weights.store import chunk_cache
from meshrl.services.node.agent import NodeAgent
from meshrl.services.node.gpus.accelerators import discover_accelerators
from meshrl.services.node.instances.desired_roles import override_commands
from meshrl.services.node.worker import add_budget_options, add_market_option


async def main(args: argparse.Namespace) -> None:
    """Open the mesh as `node/<host>` and serve until cancelled; raise ConfigError for a bad
    `--role-command`.
    """
    settings = MeshSettings.from_env()
    override_commands(args.role_command)  # validated once here, not by every worker
    await serve(await Mesh.open(f"node/{settings.host}", "node", settings), args)


async def serve(mesh: Mesh, args: argparse.Namespace) -> None:
    """Run the agent until cancelled; then stop the host's processes and leave the mesh."""
    discovered = await discover_accelerators(mesh.host, args.device, args.workers, args.emulate)
    accelerators = [
        replace(accelerator, memory_bytes=args.accelerator_bytes or accelerator.memory_bytes)
        for accelerator in discovered
    ]
    worker_options = ["--orphan-s", str(args.orphan_s), "--market", args.market]
    worker_options += ["--price", str(args.price)]
    worker_options += [
        "--memory-bytes",
        str(args.memory_bytes),
        "--disk-bytes",
        str(args.disk_bytes),
    ]
    for command in args.role_command:
        worker_options += ["--role-command", command]
    service_options = ["--orphan-s", str(args.orphan_s)]
    agent = NodeAgent(
        mesh, accelerators, worker_options, args.worker_prefix, service_options, args.services
    )
    bulk = chunk_cache.serve_cache(mesh)

    def stats() -> dict[str, Any]:
        discovered = replace(agent.stats(), bulk_sent=None if bulk is None else bulk.sent_bytes)
        return discovered.encode() | agent.gpus.stats()

    try:
        await mesh.join(agent, stats=stats, bulk_address="" if bulk is None else bulk.address)
        mesh.ready = True
        await asyncio.Event().wait()
    finally:
        if bulk is not None:
            bulk.close()
        await agent.shut_down()  # stopping the host takes longer than stopping one actor
        await mesh.leave()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workers", type=int, default=0, help="number of workers; 0 with cuda: one per GPU"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--worker-prefix",
        default="w",
        help="prefix of worker names, unique to this host in the mesh",
    )
    parser.add_argument(
        "--services",
        type=parse_services,
        default=ALL_SERVICES,
        help="services that may be placed on this host, or none",
    )
    parser.add_argument(
        "--emulate",
        "--stand-for",  # the old name
        type=lambda text: [kind for kind in text.split(",") if kind],
        default=os.environ.get("MESHRL_EMULATED_ACCELERATORS", ""),
        metavar="KIND,...",
        help="accelerators that the first CPU slots emulate, at the speed that a job declares; "
        "also in $MESHRL_EMULATED_ACCELERATORS",
    )
    add_market_option(parser)
    add_budget_options(parser)
    parser.add_argument(
        "--role-command",
        action="append",
        default=os.environ.get("MESHRL_ROLE_COMMANDS", "").splitlines(),
        metavar="ROLE=COMMAND",
        help="command that workers start for a role, in place of the built-in one; it gets the "
        "options of common/state/pool/workers/placement.py; also in $MESHRL_ROLE_COMMANDS, one "
        "a line",
    )
    parser.add_argument(
        "--orphan-s",
        type=float,
        default=ORPHAN_TIMEOUT_S,
        help="seconds after which workers without an agent exit",
    )
    return parser


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    run_service(lambda: main(arguments))
