"""Random jobs on the virtual mesh, each with the planner and with every split that stays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

from loadtests.measuring.entry import print_progress
from loadtests.regret import figures
from loadtests.regret.drawn import STEPS, draw_job
from loadtests.regret.figures import Compared
from meshrl.sim.mesh.emulated_run import EmulatedRun, run_workload
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload

PLANNER = -1  # in place of how many gangs help


def compared(seeds: Sequence[int], processes: int, verbose: bool, steps: int = 0) -> dict[str, Any]:
    """Return flat figures of the jobs of these seeds; print each job to stderr as it ends."""
    found: dict[int, dict[int, EmulatedRun]] = {seed: {} for seed in seeds}
    tasks = [
        (seed, split, steps) for seed in seeds for split in (PLANNER, *draw_job(seed).static_splits)
    ]
    rows: list[Compared] = []
    with get_context("spawn").Pool(processes) as pool:
        for seed, split, one in pool.imap_unordered(_played, tasks):
            if one.failures:
                raise RuntimeError(f"seed {seed}, split {split}: {one.failures}")
            found[seed][split] = one
            if len(found[seed]) == len(draw_job(seed).static_splits) + 1:
                runs = dict(sorted(found[seed].items()))
                planner = runs.pop(PLANNER)
                static = {split: one.rl_s for split, one in runs.items()}
                moves, judged = len(planner.moves), planner.judged_moves
                rows.append(Compared(str(seed), static, planner.rl_s, moves, judged))
                _print_result(seed, rows[-1], found[seed], verbose)
    return figures.figures(rows)


def _played(task: tuple[int, int, int]) -> tuple[int, int, EmulatedRun]:
    seed, split, steps = task
    workload: EmulatedWorkload = draw_job(seed).with_steps(steps or STEPS)
    return (
        seed,
        split,
        run_workload(workload if split == PLANNER else workload.with_static_split(split), seed),
    )


def _print_result(seed: int, row: Compared, runs: dict[int, EmulatedRun], verbose: bool) -> None:
    print_progress(row.row())
    if not verbose:
        return
    print(f"  {draw_job(seed)}", file=sys.stderr)
    for move in runs[PLANNER].moves:
        told = {key: value for key, value in move.items() if key != "others"}
        print(f"  move at {move['at_s']:.0f} s: {told}", file=sys.stderr)
    for split, one in sorted(runs.items()):
        name = "planner" if split == PLANNER else f"{split} help"
        steps = " ".join(f"{s:.1f}" for s in one.steps_s)
        print(f"  {name:8} {one.rl_s:7.1f} s, {one.cpu_s:.1f} CPU s: {steps}", file=sys.stderr)
    sys.stderr.flush()
