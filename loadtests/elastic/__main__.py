"""Benchmark of the planner against static splits, on a job that changes along its run.

Usage:

    python -m loadtests.elastic [--churn] [--steps 28] [--splits 1,3,4] [--start 1]

Paced, on the real mesh, each arm on one of its own, six workers. Along the run completions' tail
grows (the deviation of the logarithm of their lengths from 0.3 to 1.3, at one median), the tool
that grades them slows down from 0 to 2 s, and rewards settle: more and more groups have no
variance, and are sampled but not trained. So at first training binds, at the end rollout. Splits
are told by how many gangs train; the planner begins with `--start` of them: a job's default.

- `ratio_best_static`, `ratio_worst_static`: time from the beginning of training to the last
  step with the planner, over the best static split's and the worst one's.
- `ratio_span`: by how much T_rollout / T_train has grown, at least, by step records; below 3 the
  run is invalid.
- `switch_s`: median from a move's decision until it has settled; `switch_share`: all of these, of
  all accelerator-seconds.
- `planner_cpu_share`: CPU-seconds of planner processes, of all of the mesh.
- `--churn`: an engine process is killed every 20 s, with the planner alone: `moves_under_churn`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.measuring.entry import options, print_progress, report
from loadtests.measuring.rounds import rotated
from loadtests.paced.running import Arm, honest, ratio_span, run
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

WORKERS = 6
MOST = 120  # tokens of a completion
KILL_S = 20.0  # between two engines that are killed
JOB = EmulatedWorkload(
    workers=WORKERS,
    groups_per_step=8,
    group_size=6,
    median_tokens=LinearDrift(26.0, 26.0),  # the mean grows from 27 to 45 by the tail alone
    log_sigma=LinearDrift(0.3, 1.3),
    tool_s=LinearDrift(0.0, 2.0),
    equal_reward_share=LinearDrift(0.0, 0.85),
    engine_speed="32/8/20000",
    training_speed="150/100",
    bin_tokens=MOST + 2,
)
BEST, WORST = 1.05, 0.77  # our time over the best static split's, and over the worst one's
SPAN = 3.0  # T_rollout / T_train must move by so much, or there was nothing to follow
SWITCH_SHARE, PLANNER_CPU_SHARE = 0.035, 0.02
WALL_S = 720.0  # of all arms


def figures(planner: Arm, statics: Sequence[Arm], workers: int, wall_s: float) -> dict[str, Any]:
    """Return flat figures; `ratio_span` is the largest of the static splits'."""
    ordered = sorted(statics, key=lambda arm: arm.rl_s)
    span = max(map(ratio_span, statics))
    found = {
        "wall_s": round(wall_s, 1),
        "ratio_best_static": round(planner.rl_s / ordered[0].rl_s, 4),
        "ratio_worst_static": round(planner.rl_s / ordered[-1].rl_s, 4),
        "ratio_span": round(span, 2),
        **moved(planner, workers),
        **honest([planner, *statics]),
    }
    found["valid"] = int(bool(found["valid"]) and span >= SPAN and wall_s <= WALL_S)
    return found


def moved(arm: Arm, workers: int) -> dict[str, Any]:
    """Return the value and the cost of an arm's moves; None if there were none."""
    took = arm.switches_s
    return {
        "moves": len(arm.moves),
        "switch_s": round(statistics.median(took), 2) if took else None,
        "switch_share": round(sum(took) / (workers * arm.rl_s), 4),
        "planner_cpu_share": round(arm.planner_cpu_s / arm.cpu_s, 4),
    }


def good(found: Mapping[str, Any]) -> bool:
    return bool(
        found["valid"]
        and found["moves"] >= 1
        and found["ratio_best_static"] <= BEST
        and found["ratio_worst_static"] <= WORST
        and found["switch_share"] <= SWITCH_SHARE
        and found["planner_cpu_share"] <= PLANNER_CPU_SHARE
    )


async def compared(steps: int, splits: list[int], start: int, seed: int) -> dict[str, Any]:
    job = JOB.with_steps(steps)
    arms = {f"static_{k}": job.with_static_split(k - 1) for k in splits}
    arms["planner"] = job.with_initial_split(start - 1)
    started_s = time.monotonic()
    found: dict[str, Arm] = {}
    for name in rotated([*arms], seed):
        found[name] = await run(name, arms[name], seed, MOST)
        print_progress(found[name].row())
    planner = found.pop("planner")
    return figures(planner, [*found.values()], WORKERS, time.monotonic() - started_s)


async def churned(steps: int, start: int, seed: int) -> dict[str, Any]:
    """Return figures of the planner's arm while engines are killed."""
    arm = await run(
        "churn", JOB.with_steps(steps).with_initial_split(start - 1), seed, MOST, KILL_S
    )
    print_progress(arm.row())
    told = moved(arm, WORKERS)
    return {
        "killed": arm.killed,
        "moves_under_churn": told.pop("moves"),
        **told,
        **honest([arm]),
    }


def main() -> int:
    parser = options(
        __doc__,
        steps=28,
        splits=("1,3,4", "gangs that train in each static split"),
        start=(1, "those that the planner begins with"),
        seed=0,
        churn=False,
    )
    a = parser.parse_args()
    if a.churn:
        answer = asyncio.run(churned(a.steps, a.start, a.seed))
        reached = bool(answer["valid"]) and answer["moves_under_churn"] >= 1
    else:
        splits = [int(split) for split in a.splits.split(",")]
        answer = asyncio.run(compared(a.steps, splits, a.start, a.seed))
        reached = good(answer)
    report(answer)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
