"""Benchmark of the mesh's cost: CPU-seconds per trained token beside a plain loop in one process.

Usage:

    python -m loadtests.overhead [examples/calculator.toml] [--steps 40] [--seed 0]

Same seed, same warm-started weights, same number of steps. The mesh is charged for every process
of its own from the first admission to the last step commit, and for all that its role processes
have used since they started; evaluation is left out on both sides. Tokens are those of all
sequences of the groups that were trained.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch

from loadtests.measuring.entry import options, report
from loadtests.measuring.metered import Meter, all_events, started
from loadtests.plain.loop import Job, run_plain, warmed_up
from loadtests.plain.warm_cache import cache_weights
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import StateClient

LOOK_S = 0.05
RUN_S = 900.0


def main() -> None:
    parser = options(__doc__, steps=40, seed=0)
    parser.add_argument("job", type=Path, nargs="?", default=Path("examples/calculator.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="on both")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    job = Job(chosen.job, chosen.set)
    with tempfile.TemporaryDirectory(prefix="meshrl-overhead-") as scratch:
        state = warmed_up(job, chosen.seed)
        cache = Path(scratch) / "cache"
        mesh = asyncio.run(run_mesh(chosen, Path(scratch), cache, state))
        plain = run_plain(job, chosen.seed, chosen.steps, state)
    report(compare(mesh, plain, chosen.steps))


def compare(mesh: dict[str, Any], plain: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the flat result; `share_<kind>` divides the mesh's CPU time."""
    mesh_token = mesh["cpu_s"] / mesh["tokens_trained"]
    plain_token = plain["cpu_s"] / plain["tokens_trained"]
    answer = {
        "plain_cpu_s_per_step": plain["cpu_s"] / steps,
        "mesh_cpu_s_per_step": mesh["cpu_s"] / steps,
        "ratio_cpu_per_token": mesh_token / plain_token,
    }
    for kind, used in sorted(mesh["by_kind"].items(), key=lambda item: -item[1]):
        answer[f"share_{kind}"] = used / mesh["cpu_s"]
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in answer.items()}


async def run_mesh(
    chosen: argparse.Namespace, scratch: Path, cache: Path, state: dict[str, torch.Tensor]
) -> dict[str, Any]:
    out = scratch / "run"
    own = [f"seed={chosen.seed}", *chosen.set]
    cache_weights(chosen.job, own, scratch / "probe", cache, state)
    changes = {
        "out": str(out),
        "seed": chosen.seed,
        "cache": str(cache),
        "budget.steps": chosen.steps,
        "evaluation.every": 0,
        "evaluation.before": "false",
        "evaluation.after": "false",
    }
    words = [f"{key}={value}" for key, value in changes.items()]
    async with started(chosen.job, out, *words, *chosen.set) as (store, meter):
        async with asyncio.timeout(RUN_S):
            return await measure(store, out, meter)


async def measure(state: StateClient, out: Path, meter: Meter) -> dict[str, Any]:
    """Read the meter at the first admission and at the last commit."""
    first: dict[str, float] | None = None
    while True:
        meter.record_usage()
        row = next(iter(await jobs.read_jobs(state)), None)
        if row is not None and row.phase in (jobs.Phase.EVALUATION, *jobs.TERMINAL_PHASES):
            break  # a job so short that no admission was seen counts from its start
        if row is not None and row.opened and first is None:
            first = meter.reading(roles=False)
        await asyncio.sleep(LOOK_S)
    last = meter.reading(roles=True)
    found = await all_events(state, out)
    before = first or {}
    by_kind = {kind: used - before.get(kind, 0.0) for kind, used in last.items()}
    return {
        "cpu_s": sum(by_kind.values()),
        "by_kind": by_kind,
        "tokens_trained": sum(
            e.fields["metrics"]["tokens_trained"] for e in found if e.kind == "step"
        ),
    }


if __name__ == "__main__":
    main()
