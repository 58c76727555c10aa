"""Training strictly on-policy with spot workers that vanish and come, on emulated accelerators.

Usage:

    python -m loadtests.spot [--arms reserved,always,trace] [--trace-s 180] [--spot 3] [--seed 1]

One job on the real mesh, without staleness, with a reserved worker for its core. Engines there seed
each step. Spot workers are hosts on this machine that join as a user's do. Arms:

- `reserved`: no spot workers;
- `always`: spot workers that never vanish;
- `trace`: they vanish and come by a seeded trace, or a CSV file as of `meshrl simulate spot`. All
  processes of a host get SIGKILL, half of the time after a notice in a file.

The last line is JSON: `ratio_reserved`, `ratio_always` (tokens trained per second, `trace` over the
other arm), `lost`, `trained_twice`, `tokens_redone_share`, `first_token_s_*` of hosts that joined
during training, `handover_s`, and `cost_per_million_tokens_*`. `valid` is 0 if the host was too
busy for the declared speeds. `loadtests/spot/figures.py` has them all.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from loadtests.measuring.entry import arms_of, options, report
from loadtests.spot.arms import SpotPlan, run_arm
from loadtests.spot.figures import compare
from meshrl.sim.cluster.model.availability import (
    SegmentTable,
    draw_availability,
    read_availability,
)

MEAN_SHARE = 2 / 3  # of the spot workers are available
CHANGE_S = 18.0  # mean time between changes
ARMS = ("reserved", "always", "trace")


def main() -> None:
    parser = options(
        __doc__,
        arms=",".join(ARMS),
        seed=1,
        spot=(3, "spot workers, at most"),
        trace_s=(180.0, "of the trace"),
        availability=(Path, "CSV file with the columns time_s and instances, as the trace"),
        rollout_s=(6.0, "of a step on one engine"),
        training_s=(2.0, "of a step"),
        steps=("16,34,32", "of each arm, in the order reserved,always,trace"),
    )
    chosen = parser.parse_args()
    names = arms_of(parser, chosen.arms, ARMS)
    steps = dict(zip(ARMS, map(int, chosen.steps.split(",")), strict=True))
    if chosen.availability:
        trace = read_availability(chosen.availability)
    else:
        trace = draw_availability(
            SegmentTable(
                seed=chosen.seed,
                seconds=chosen.trace_s,
                most=chosen.spot,
                mean=MEAN_SHARE * chosen.spot,
                change_s=CHANGE_S,
                burst=chosen.spot,
            )
        )
    plan = SpotPlan(chosen.seed, chosen.spot, chosen.rollout_s, chosen.training_s, trace, steps)
    started_s = time.monotonic()
    arms = [asyncio.run(run_arm(name, plan)) for name in names]
    report(compare(arms) | {"wall_s": round(time.monotonic() - started_s, 1)})


if __name__ == "__main__":
    main()
