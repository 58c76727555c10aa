"""Three paced jobs on the real mesh, each with the planner and with every split that stays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from loadtests.measuring.entry import print_progress
from loadtests.measuring.rounds import rotated
from loadtests.paced.running import Arm, honest, run
from loadtests.regret.figures import Compared, figures
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

MOST = 120  # tokens of a completion
WALL_S = 1200.0  # of all arms
STEPS = 26


def _job(workers: int, decode_ms: int, training: str, **changes: Any) -> EmulatedWorkload:
    return EmulatedWorkload(
        workers=workers,
        steps=STEPS,
        groups_per_step=8,
        group_size=4,
        median_tokens=LinearDrift(27.0, 27.0),
        log_sigma=LinearDrift(0.4, 0.4),
        engine_speed=f"{decode_ms}/16/20000",
        training_speed=training,
        bin_tokens=MOST + 2,
        **changes,
    )


JOBS = {
    "trained": _job(4, 50, "250/50"),  # training takes 4 s on the core alone, rollout 1 s beside it
    "even": _job(4, 80, "600/50", tool_s=LinearDrift(0.3, 0.3)),  # 1.7 s and 1.6 s: it should stay
    "small": _job(3, 55, "200/50"),  # 5 s and 1.7 s
}


async def compared(names: Sequence[str], seed: int, steps: int = 0) -> dict[str, Any]:
    """Return flat figures of these jobs; the order of arms alternates."""
    started_s = time.monotonic()
    rows: list[Compared] = []
    every: list[Arm] = []
    for number, name in enumerate(names):
        job = JOBS[name].with_steps(steps or STEPS)
        found: dict[int, Arm] = {}  # by the gangs that help; -1: the planner's
        for split in rotated([-1, *job.static_splits], number):
            arm = "planner" if split < 0 else f"static_{split}"
            found[split] = await run(
                arm, job if split < 0 else job.with_static_split(split), seed, MOST
            )
            print_progress(found[split].row())
        every += found.values()
        planner = found.pop(-1)
        static = {split: arm.rl_s for split, arm in sorted(found.items())}
        moves, judged = len(planner.moves), planner.judged
        rows.append(Compared(name, static, planner.rl_s, moves, judged))
        print_progress(rows[-1].row())
    wall_s = time.monotonic() - started_s
    told = honest(every) | {"wall_s": round(wall_s, 1)}
    told["valid"] = int(bool(told["valid"]) and wall_s <= WALL_S)
    return figures(rows, "real_") | {f"real_{key}": value for key, value in told.items()}
