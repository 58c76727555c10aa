"""Several jobs at once, beside each of them alone: what they learn, whether anything is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from loadtests.jobs.mesh import mesh_up
from loadtests.jobs.plan import Plan, accounts, greedy
from loadtests.measuring.rounds import Arm

ALONE = 2  # workers of a job alone: an engine and a core
SPREAD = 3  # seeds alone that the spread is of


async def together(plan: Plan, arm: str, workers: int, seeds: Sequence[int]) -> Arm:
    """One job for each seed, submitted at once to a mesh of so many workers."""
    with plan.folder(arm) as folder:
        async with mesh_up(folder, workers) as mesh:
            handles = [
                await mesh.submit(plan.job, f"seed{seed}", *plan.overrides(seed)) for seed in seeds
            ]
            summaries = await asyncio.gather(*(mesh.finished(handle) for handle in handles))
        return {
            "workers": workers,
            "greedy": {str(s): greedy(found) for s, found in zip(seeds, summaries, strict=True)},
            "steps": sum(int(found["steps"]) for found in summaries),
            # The most jobs that had workers at once: queueing is no sharing.
            "at_once": max((len(jobs) for _, jobs in mesh.watched.held), default=0),
            **accounts(list(summaries)),
            **mesh.watched.honest(),
        }


async def solo(plan: Plan) -> Arm:
    """Each seed alone, one after the other, each on a mesh of its own."""
    runs = [await together(plan, "solo", ALONE, [seed]) for seed in plan.seeds]
    reached = {seed: value for run in runs for seed, value in run["greedy"].items()}
    return {
        "greedy": reached,
        "runs": runs,
        "lost": sum(run["lost"] for run in runs),
        "trained_twice": sum(run["trained_twice"] for run in runs),
        "mesh_cores": max(run["mesh_cores"] for run in runs),
        "late_share": max((run["late_share"] or 0.0 for run in runs), default=0.0),
        "valid": min(run["valid"] for run in runs),
    }


def gap(alone: Arm, beside: Arm) -> dict[str, Any]:
    """How much less than alone a seed reaches beside others, at most; and how much three seeds
    alone differ.
    """
    own = alone["greedy"]
    alone_only = list(own.values())[:SPREAD]
    gaps = [own[seed] - reached for seed, reached in beside["greedy"].items()]
    return {
        "accuracy_gap": round(max(gaps), 4),
        "solo_spread": round(max(alone_only) - min(alone_only), 4),
    }
