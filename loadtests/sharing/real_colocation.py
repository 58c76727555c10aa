"""Colocated mode, the split, and the planner's choice on the real mesh with emulated accelerators.

A cell is a number of workers, a ratio of rollout to training, and a staleness. Each of its modes is
a job on a mesh of its own. One worker has no split: there the planner's choice is compared with the
colocated mode, which it has to take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from loadtests.measuring.entry import print_progress
from loadtests.paced.running import Arm, honest, run
from loadtests.sharing.colocation import (
    ACCELERATORS,
    RATIOS,
    ColocationCase,
    ColocationResult,
    list_modes,
    predict_rollout_s,
    set_training_speed,
    summarize,
)
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

STEP_S = 2.4  # of rollout on one engine, and then training on one worker
MEDIAN_TOKENS, MAX_TOKENS = 12.0, 40  # few decode steps, as the host's processors compute them
SETTLED_SHARE = 0.4  # of a run's steps, the last ones: the planner has chosen by then
CELLS = ",".join(f"{number}:{ratio:g}" for number, ratio in product(ACCELERATORS, RATIOS))


def parse_cell(text: str) -> ColocationCase:
    """Parse `WORKERS:RATIO` or `WORKERS:RATIO:STALENESS`."""
    workers, ratio, *staleness = text.split(":")
    return ColocationCase(int(workers), float(ratio), int(staleness[0]) if staleness else 0, 0)


def measure_real_colocation(cells: Sequence[ColocationCase], steps: int) -> dict[str, Any]:
    """Return flat figures of the settled steps of all cells, and of whole runs (`real_run_*`)."""
    arms: list[Arm] = []
    settled, whole = [], []
    for case in cells:
        found = {mode: asyncio.run(_run_mode(case, mode, steps)) for mode in list_modes(case)}
        arms += found.values()
        mode = describe_choice(found["auto"], case)
        step_s = {mode: compute_settled_step_s(arm) for mode, arm in found.items()}
        settled.append(ColocationResult(case, step_s, mode))
        whole.append(ColocationResult(case, {k: arm.rl_s for k, arm in found.items()}, mode))
        print_progress(f"steps: {settled[-1].describe()}")
        print_progress(f"runs: {whole[-1].describe()}")
    of_runs = {k: v for k, v in summarize(whole).items() if k.startswith("auto")}
    figures = summarize(settled) | {f"run_{key}": value for key, value in of_runs.items()}
    figures |= honest(arms) | {"cells": len(cells)}
    return {f"real_{key}": value for key, value in figures.items()}


def compute_settled_step_s(arm: Arm) -> float:
    """Return the mean seconds of a run's last steps."""
    count = max(1, round(SETTLED_SHARE * len(arm.ends_s)))
    return (arm.ends_s[-1] - arm.ends_s[-1 - count]) / count


def describe_choice(arm: Arm, case: ColocationCase) -> str:
    """Return the mode of the planner's last judged change."""
    if case.accelerators == 1:
        return "colocated"
    changes = [one for one in arm.judged if one["to"] in ("colocated", "split")]
    return next((str(c["from"] if c["undone"] else c["to"]) for c in reversed(changes)), "split")


async def _run_mode(case: ColocationCase, mode: str, steps: int) -> Arm:
    changes = [f"pool.colocate={mode}", f"algorithm.max_staleness={case.staleness}"]
    job = build_real_workload(case, steps)
    arm = await run(mode, job, case.seed, MAX_TOKENS, changes=changes)
    print_progress(arm.row())
    return arm


def build_real_workload(case: ColocationCase, steps: int) -> EmulatedWorkload:
    """Return a job whose rollout on one engine and training on one worker take `STEP_S` together.

    The seconds of a decode step follow from the ratio.
    """
    tokens = LinearDrift(MEDIAN_TOKENS, MEDIAN_TOKENS)
    job = EmulatedWorkload(
        workers=case.accelerators,
        steps=steps,
        median_tokens=tokens,
        log_sigma=LinearDrift(0.4, 0.4),
        engine_speed="1/8/4000",
        bin_tokens=MAX_TOKENS + 2,
    )
    rollout_s = STEP_S * case.ratio / (1 + case.ratio)
    decode_ms = rollout_s / predict_rollout_s(job)
    job = replace(job, engine_speed=f"{decode_ms:.3f}/8/100000")
    return set_training_speed(job, case.ratio, rollout_s)
