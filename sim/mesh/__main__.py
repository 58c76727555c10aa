"""Entry point of the virtual mesh: `python -m meshrl.sim.mesh --seed 7 --faults all --hours
0.167`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from meshrl.sim.mesh.faults.fault_schedule import FAULT_KINDS
from meshrl.sim.mesh.job.job_setup import MAX_STALENESS
from meshrl.sim.mesh.seed_runner import MeshOutcome, MeshPlan, run_plan


def build_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m meshrl.sim.mesh", description=__doc__)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--seeds", default="", metavar="A:B", help="every seed from A to B - 1")
    found.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    found.add_argument(
        "--faults", default="all", help=f"all, none, or some of {','.join(FAULT_KINDS)}"
    )
    found.add_argument(
        "--hours", type=float, default=1 / 6, help="hours of virtual time with faults"
    )
    found.add_argument(
        "--pace",
        type=float,
        default=1.0,
        help="factor on the time between faults; above 1: rarer faults",
    )
    found.add_argument("--budget", type=int, default=0, help="steps; 0: as many as fit")
    found.add_argument("--workers", type=int, default=2)
    found.add_argument("--shards", type=int, default=1)
    found.add_argument("--mesh-jobs", type=int, default=1, help="jobs of the mesh")
    found.add_argument("--ranks", type=int, default=1)
    found.add_argument(
        "--staleness", type=int, default=MAX_STALENESS, help="`max_staleness` of each job"
    )
    found.add_argument(
        "--colocated", action="store_true", help="engines on the core's workers, which seed steps"
    )
    found.add_argument("--log", type=Path, help="file for the log of all events")
    return found


def parse_plan(args: argparse.Namespace) -> MeshPlan:
    shape = args.workers, args.shards, args.ranks
    return MeshPlan(
        *(args.seed, args.faults, args.hours, *shape, args.pace, args.budget, args.mesh_jobs),
        staleness=args.staleness,
        colocated=args.colocated,
    )


def main() -> int:
    a = build_parser().parse_args()
    plan = parse_plan(a)
    if a.seeds:
        first, _, last = a.seeds.partition(":")
        return run_seeds(
            [replace(plan, seed=seed) for seed in range(int(first), int(last))], a.jobs
        )
    outcome = run_plan(plan, a.log)
    print(json.dumps(outcome.to_document(), indent=1))
    return print_failures([outcome])


def run_seeds(plans: list[MeshPlan], process_count: int) -> int:
    """Run plans in several processes; print a line of JSON for each, then a summary."""
    outcomes = []
    for outcome in _run_plans(plans, process_count):
        outcomes.append(outcome)
        print(json.dumps(outcome.to_document()), flush=True)
    virtual_s, cpu_s = sum(o.virtual_s for o in outcomes), sum(o.cpu_s for o in outcomes)
    summary = {
        "seeds": len(outcomes),
        "failures": [o.plan.seed for o in outcomes if o.violations],
        "virtual_s": round(virtual_s, 1),
        "cpu_s": round(cpu_s, 1),
        "virtual_s_per_cpu_s": round(virtual_s / max(cpu_s, 1e-9), 1),
    }
    print(json.dumps(summary))
    return print_failures(outcomes)


def _run_plans(plans: list[MeshPlan], process_count: int) -> Iterator[MeshOutcome]:
    if process_count == 1:
        yield from map(run_plan, plans)
        return
    with get_context("spawn").Pool(process_count) as pool:
        yield from pool.imap_unordered(run_plan, plans)


def print_failures(outcomes: list[MeshOutcome]) -> int:
    """Print commands that replay the failed runs; return the exit status."""
    failed = [outcome for outcome in outcomes if outcome.violations]
    for outcome in failed:
        print(
            f"replay: {outcome.plan.replay_command} --log seed-{outcome.plan.seed}.log",
            file=sys.stderr,
        )
        for violation in outcome.violations[:10]:
            print(f"  {violation}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
