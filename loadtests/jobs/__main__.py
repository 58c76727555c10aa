"""Benchmark of several jobs on one mesh: learning, sharing, and the speed of reassignments.

Usage:

    python -m loadtests.jobs [--arms solo,pair,quad,share,preempt,makespan,moves] [--steps 16]

Jobs are the calculator with engines and cores at a declared pace (`--rollout-pace`,
`--training-pace`; empty: as fast as the processors are), each arm on a mesh of its own by
`meshrl up`. Rounds of all arms run in rotating order; figures are medians over rounds.

- `accuracy_gap`: how much less a seed reaches beside others than alone, the worst of two on
  4 workers (`pair`) and of four on 6 (`quad`), beside `solo_spread` of three; `lost`,
  `trained_twice`.
- `share_error`: workers of two jobs of shares 1:1 and 1:3 on 8, against max-min after floors.
- `preempt_s`: until a job of higher priority has its least workers.
- `makespan_ratio`: two jobs at once over one after the other, on 4 workers.
- `role_change_s_FROM_TO_p50`: from decision to ready; from `idle` it is a fresh process.
  `others_rate`: pieces a second of everybody else during a move, over before.

`late_share` is of steps that ended later than their pace; an arm in which the host used more than
1.6 cores is invalid, and the result says so.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from loadtests.jobs import sharing
from loadtests.jobs.mesh import Paces, Plan, accounts, greedy
from loadtests.measuring.entry import arms_of, options, report
from loadtests.measuring.rounds import Arm, measured, median_of

ALONE = 2  # workers of a job alone: an engine and a core
SPREAD = 3  # seeds alone that the spread is of
WORKERS = 4
BALANCED = ("training.emulate=800/200", "evaluation.problems=64")


async def pair_s(plan: Plan, at_once: bool) -> Arm:
    """Return the seconds from the first submission to the end of both jobs."""
    async with plan.mesh("span", WORKERS) as mesh:
        started_s = time.monotonic()
        summaries, handles = [], []
        for seed in plan.seeds[:2]:
            changes = plan.overrides(seed, *BALANCED)
            handles.append(await mesh.submit(plan.job, f"seed{seed}", *changes))
            if not at_once:
                summaries.append(await mesh.finished(handles[-1]))
        if at_once:
            summaries = list(await asyncio.gather(*(mesh.finished(h) for h in handles)))
        took = time.monotonic() - started_s
    return {"makespan_s": round(took, 2), **accounts(summaries), **mesh.watched.honest()}


async def together(plan: Plan, arm: str, workers: int, seeds: Sequence[int]) -> Arm:
    async with plan.mesh(arm, workers) as mesh:
        handles = [
            await mesh.submit(plan.job, f"seed{seed}", *plan.overrides(seed)) for seed in seeds
        ]
        summaries = await asyncio.gather(*(mesh.finished(handle) for handle in handles))
    return {
        "greedy": {str(s): greedy(found) for s, found in zip(seeds, summaries, strict=True)},
        **accounts(summaries),
        **mesh.watched.honest(),
    }


async def solo(plan: Plan) -> Arm:
    runs = [await together(plan, "solo", ALONE, [seed]) for seed in plan.seeds]
    reached = {seed: value for run in runs for seed, value in run["greedy"].items()}
    return {
        "greedy": reached,
        "runs": runs,
        "lost": sum(run["lost"] for run in runs),
        "trained_twice": sum(run["trained_twice"] for run in runs),
        "late_share": max((run["late_share"] or 0.0 for run in runs), default=0.0),
        "valid": min(run["valid"] for run in runs),
    }


def gap(alone: Arm, beside: Arm) -> dict[str, Any]:
    """Return the most that a seed loses beside others, and the spread of three seeds alone."""
    own = alone["greedy"]
    alone_only = list(own.values())[:SPREAD]
    gaps = [own[seed] - reached for seed, reached in beside["greedy"].items()]
    return {
        "accuracy_gap": round(max(gaps), 4),
        "solo_spread": round(max(alone_only) - min(alone_only), 4),
    }


JOB = Path(__file__).parents[2] / "examples" / "calculator.toml"
RUNS: dict[str, Callable[[Plan], Awaitable[Arm]]] = {
    "solo": solo,
    "pair": lambda plan: together(plan, "pair", 4, plan.seeds[:2]),
    "quad": lambda plan: together(plan, "quad", 6, plan.seeds[:4]),
    "share": lambda plan: sharing.share(plan, (1.0, 1.0)),
    "share13": lambda plan: sharing.share(plan, (1.0, 3.0)),
    "preempt": sharing.preempt,
    "together": lambda plan: pair_s(plan, True),
    "in_turn": lambda plan: pair_s(plan, False),
    "moves": sharing.moves,
}
PARTS = {"share": ("share", "share13"), "makespan": ("together", "in_turn")}


def result(found: dict[str, list[Arm]]) -> dict[str, Any]:
    every = [arm for arms in found.values() for arm in arms]
    answer: dict[str, Any] = {
        "valid": min(arm["valid"] for arm in every),
        "late_share": max((arm["late_share"] or 0.0 for arm in every), default=0.0),
        "host_cores": max(arm.get("host_cores", 0.0) for arm in every),
        "steal_cores": max(arm.get("steal_cores", 0.0) for arm in every),
    }
    for key in ("lost", "trained_twice"):
        counts = [arm[key] for arm in every if key in arm]
        if counts:
            answer[key] = sum(counts)
    if "solo" in found:
        for name in ("pair", "quad"):
            gaps = [gap(a, b) for a, b in zip(found["solo"], found.get(name, []), strict=False)]
            if gaps:
                answer[f"accuracy_gap_{name}"] = median_of(gaps, "accuracy_gap")
                answer["solo_spread"] = median_of(gaps, "solo_spread")
    for name, label in (("share", "share_error_1_1"), ("share13", "share_error_1_3")):
        if found.get(name):
            answer[label] = median_of(found[name], "share_error")
    if found.get("together") and found.get("in_turn"):
        pairs = zip(found["together"], found["in_turn"], strict=True)
        ratios = [a["makespan_s"] / b["makespan_s"] for a, b in pairs]
        answer["makespan_ratio"] = round(statistics.median(ratios), 4)
    for name in ("preempt", "moves"):
        for arm in found.get(name, [])[-1:]:
            kept = ("preempt_s", "role_change_s", "others_rate")
            answer |= {key: value for key, value in arm.items() if key.startswith(kept)}
    return answer


def main() -> int:
    parser = options(
        __doc__,
        arms="solo,pair,quad,share,preempt,makespan,moves",
        steps=(16, "of each job"),
        problems=(256, "of an evaluation"),
        rounds=1,
        moves=(3, "of each kind, and preemptions"),
        window_s=(60.0, "that shares are taken over"),
        seeds=("0,1,2,3", "four; each has a warm start of its own"),
        rollout_pace=Paces.rollout,
        training_pace=Paces.training,
    )
    parser.add_argument("job", type=Path, nargs="?", default=JOB)
    a = parser.parse_args()
    names = arms_of(parser, a.arms, RUNS, PARTS)
    paces = Paces(a.rollout_pace, a.training_pace)
    seeds = tuple(map(int, a.seeds.split(",")))
    plan = Plan(a.job.resolve(), a.steps, a.problems, paces, seeds, a.moves, a.window_s)
    answer = result(asyncio.run(measured(RUNS, plan, names, a.rounds)))
    report(answer)
    good = answer.get("lost", 0) == 0 and answer.get("trained_twice", 0) == 0
    return 0 if good and answer["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
