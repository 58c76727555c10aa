"""Whether the planner's moves pay: against every static split, on jobs that were drawn.

    python -m loadtests.regret [--arms demo,virtual,real] [--seeds 0:30] [--processes 2] [-v]

- `demo`: `demo_time_ratio`, RL phase of `make demo` with the planner over the one with its first
  split held (`planner.moves = false`), median of three seeds.
- `virtual`: random jobs on the virtual mesh, each with the planner and with every split that stays:
  `regret_p90`, time lost against the best of these; `far_defaults`, jobs whose first split loses
  15 % or more; `moves_that_paid` of those that the planner judged; `prediction_error_p50` of the
  steps that it predicted for them. It takes 20 minutes of two cores.
- `real`: three paced jobs on the real mesh, the same figures as `real_*`; invalid when the host
  used more than 1.6 cores.

The last line is JSON; the exit status says whether what is asked of every arm was reached.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from loadtests.measuring.entry import options, report
from loadtests.regret import demo, figures, real, virtual

DEMO = 1.02  # most of demo_time_ratio
FAR_DEFAULTS, MOVES = 10, 15  # of thirty jobs: with fewer there was nothing to decide


def parser() -> argparse.ArgumentParser:
    found = options(
        __doc__,
        arms="demo,virtual,real",
        demo_seeds="3,4,5",
        processes=(2, "that run virtual jobs"),
        steps=(0, "of each job but the demo; 0: its own"),
        jobs=(",".join(real.JOBS), "of the real mesh"),
    )
    found.add_argument("--seeds", default="0:30", metavar="A:B", help="of the virtual jobs")
    found.add_argument("-v", "--verbose", action="store_true", help="tells of every virtual run")
    return found


def main() -> int:
    a = parser().parse_args()
    first, _, last = a.seeds.partition(":")
    answer: dict[str, Any] = {}
    reached = True
    arms = a.arms.split(",")
    if "demo" in arms:
        answer |= asyncio.run(demo.compared([int(seed) for seed in a.demo_seeds.split(",")]))
        reached &= answer["demo_time_ratio"] <= DEMO
    if "virtual" in arms:
        answer |= virtual.compared(range(int(first), int(last)), a.processes, a.verbose, a.steps)
        reached &= figures.good(answer) and answer["far_defaults"] >= FAR_DEFAULTS
        reached &= answer["moves"] >= MOVES
    if "real" in arms:
        answer |= asyncio.run(real.compared(a.jobs.split(","), 0, a.steps))
        reached &= bool(answer["real_valid"]) and figures.good(answer, "real_")
    report(answer)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
