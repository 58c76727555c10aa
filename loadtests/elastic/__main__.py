"""A job that turns into another along its run: the planner against splits that stay.

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
import sys
import time
from typing import Any

from loadtests.elastic.figures import figures, good, moved
from loadtests.measuring.entry import options, report, tell
from loadtests.measuring.rounds import rotated
from loadtests.paced.running import Arm, honest, run
from meshrl.sim.drift import Drift
from meshrl.sim.mesh.job.workload import PacedWorkload

WORKERS = 6
MOST = 120  # tokens of a completion
KILL_S = 20.0  # between two engines that are killed
JOB = PacedWorkload(
    workers=WORKERS,
    groups_per_step=8,
    group_size=6,
    median=Drift(26.0, 26.0),  # the mean grows from 27 to 45 by the tail alone
    sigma=Drift(0.3, 1.3),
    tool_s=Drift(0.0, 2.0),
    alike=Drift(0.0, 0.85),
    decode="32/8/20000",
    training="150/100",
    bin_tokens=MOST + 2,
)


async def compared(steps: int, splits: list[int], start: int, seed: int) -> dict[str, Any]:
    """Figures of all arms, which run in an order that the seed turns."""
    job = JOB.of_steps(steps)
    arms = {f"static_{k}": job.held(k - 1) for k in splits}
    arms["planner"] = job.beginning(start - 1)
    began = time.monotonic()
    found: dict[str, Arm] = {}
    for name in rotated([*arms], seed):
        found[name] = await run(name, arms[name], seed, MOST)
        tell(found[name].row())
    planner = found.pop("planner")
    return figures(planner, [*found.values()], WORKERS, time.monotonic() - began)


async def churned(steps: int, start: int, seed: int) -> dict[str, Any]:
    """Figures of the planner's arm while engines are killed."""
    began = time.monotonic()
    arm = await run("churn", JOB.of_steps(steps).beginning(start - 1), seed, MOST, KILL_S)
    tell(arm.row())
    told = moved(arm, WORKERS)
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "planner_s": round(arm.rl_s, 1),
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
