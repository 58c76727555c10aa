"""The entry of the virtual mesh: `python -m meshrl.sim.mesh --seed 7 --faults all --hours
0.167`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from meshrl.sim.mesh.faults.faults import KINDS
from meshrl.sim.mesh.running import MeshOutcome, MeshPlan, play


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m meshrl.sim.mesh", description=__doc__)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--seeds", default="", metavar="A:B", help="every seed from A to B - 1")
    found.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    found.add_argument("--faults", default="all", help=f"all, none, or some of {','.join(KINDS)}")
    found.add_argument("--hours", type=float, default=1 / 6, help="of virtual time with faults")
    found.add_argument("--pace", type=float, default=1.0, help="more than 1: rarer faults")
    found.add_argument("--budget", type=int, default=0, help="steps; 0: as many as fit")
    found.add_argument("--workers", type=int, default=2)
    found.add_argument("--shards", type=int, default=1)
    found.add_argument("--mesh-jobs", type=int, default=1, help="jobs of the mesh")
    found.add_argument("--ranks", type=int, default=1)
    found.add_argument("--log", type=Path, help="writes all that happens to this file")
    return found


def plan_of(a: argparse.Namespace) -> MeshPlan:
    shape = a.workers, a.shards, a.ranks
    return MeshPlan(a.seed, a.faults, a.hours, *shape, a.pace, a.budget, a.mesh_jobs)


def main() -> int:
    a = parser().parse_args()
    plan = plan_of(a)
    if a.seeds:
        first, _, last = a.seeds.partition(":")
        return many([replace(plan, seed=seed) for seed in range(int(first), int(last))], a.jobs)
    outcome = play(plan, a.log)
    print(json.dumps(outcome.document(), indent=1))
    return told([outcome])


def many(plans: list[MeshPlan], jobs: int) -> int:
    """Runs plans in so many processes: a line of JSON each, then one of them all."""
    outcomes = []
    for outcome in _played(plans, jobs):
        outcomes.append(outcome)
        print(json.dumps(outcome.document()), flush=True)
    virtual_s, cpu_s = sum(o.virtual_s for o in outcomes), sum(o.cpu_s for o in outcomes)
    summary = {
        "seeds": len(outcomes),
        "failures": [o.plan.seed for o in outcomes if o.violations],
        "virtual_s": round(virtual_s, 1),
        "cpu_s": round(cpu_s, 1),
        "virtual_s_per_cpu_s": round(virtual_s / max(cpu_s, 1e-9), 1),
    }
    print(json.dumps(summary))
    return told(outcomes)


def _played(plans: list[MeshPlan], jobs: int) -> Iterator[MeshOutcome]:
    if jobs == 1:
        yield from map(play, plans)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(play, plans)


def told(outcomes: list[MeshOutcome]) -> int:
    """Says how to replay what failed; the exit status."""
    failed = [outcome for outcome in outcomes if outcome.violations]
    for outcome in failed:
        print(f"again: {outcome.plan.command} --log seed-{outcome.plan.seed}.log", file=sys.stderr)
        for violation in outcome.violations[:10]:
            print(f"  {violation}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
