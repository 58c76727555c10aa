"""Accuracy test of simulated clusters: step seconds of the same jobs in simulation, on a virtual
and a real mesh.

Usage:

    python -m loadtests.simulator [--arms virtual,broad,real] [--seeds 0:8] [--processes 2]

- `virtual`: random jobs, with their first split, two that stay and the planner: `step_time_error`,
  the median of how far the simulated step is off as a share of the virtual mesh's.
- `broad`: one job of 64 gangs, on both: `broad_step_time_error`.
- `real`: paced jobs on the real mesh: `real_step_time_error`; invalid when the host used more than
  1.6 cores.

Nothing is fitted: a simulated job has the paces, lengths and sizes that the other's file declares.
`speed_up` is the CPU time of all virtual runs over that of the simulated ones. The last line is
JSON; the exit status says whether every error is 0.15 at most.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from typing import Any

from loadtests.measuring.entry import options, print_progress, report
from loadtests.paced.running import honest
from loadtests.paced.running import run as run_real
from loadtests.regret.drawn import draw_job
from loadtests.regret.real import JOBS, MOST
from loadtests.simulator.virtually import run_virtually
from meshrl.common.job.config import PlannerConfig
from meshrl.common.job.emulation import parse_engine_speed, parse_training_speed
from meshrl.sim.cluster.model.cluster import SimCluster, SimHosts
from meshrl.sim.cluster.model.job import JobSpec
from meshrl.sim.cluster.model.speeds import EmulatedSpeed
from meshrl.sim.cluster.model.training import EmulatedTraining
from meshrl.sim.cluster.model.workload import LogNormalWorkload
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.emulated_workload import ENGINE_SLOTS, MAX_TOKENS, EmulatedWorkload

ERROR = 0.15
UNTIL_S = 14_400.0
BROAD = EmulatedWorkload(
    workers=64,
    steps=8,
    groups_per_step=48,
    group_size=8,
    median_tokens=LinearDrift(30.0, 30.0),
    log_sigma=LinearDrift(0.7, 0.7),
    tool_s=LinearDrift(1.0, 1.0),
    engine_speed="120/8/4000",
    training_speed="260/100",
    allows_moves=False,
    hybrid_count=15,
)


def spec_of(job: EmulatedWorkload, seed: int, longest: int = MAX_TOKENS) -> JobSpec:
    pace, training = parse_engine_speed(job.engine_speed), parse_training_speed(job.training_speed)
    return JobSpec(
        workload=LogNormalWorkload(
            seed, job.turns, job.median_tokens, job.log_sigma, job.tool_s, max_tokens=longest
        ),
        training_speed=EmulatedTraining(training, job.bin_tokens),
        get_engine_speed=lambda kind, degree: EmulatedSpeed(
            pace.with_tensor_parallel(degree), kind, degree
        ),
        steps=job.steps,
        groups_per_step=job.groups_per_step,
        group_size=job.group_size,
        slots=ENGINE_SLOTS,
        bin_tokens=job.bin_tokens,
        planner=PlannerConfig(
            moves=job.allows_moves, training=1 + job.hybrid_count, **dict(job.planner_options)
        ),
        emulated_engine=job.engine_speed,
        emulated_training=job.training_speed,
    )


def broad(gangs: int) -> EmulatedWorkload:
    """Return the broad job for so many gangs, each with as much work as of the declared ones."""
    share = gangs / BROAD.workers
    return replace(
        BROAD,
        workers=gangs,
        groups_per_step=max(1, round(share * BROAD.groups_per_step)),
        hybrid_count=round(share * BROAD.hybrid_count),
    )


def simulated(
    workload: EmulatedWorkload, seed: int, longest: int = MAX_TOKENS
) -> tuple[float, float]:
    began_s = time.process_time()
    cluster = SimCluster([SimHosts(1, workload.workers)], [spec_of(workload, seed, longest)])
    cluster.run(UNTIL_S)
    (job,) = cluster.jobs.values()
    if not job.training.is_finished or job.training_started_s is None:
        raise RuntimeError(f"{workload} did not end in {UNTIL_S} s: run tests/unit/sim/cluster")
    return (
        job.training.step_ends_s[-1] - job.training_started_s
    ) / workload.steps, time.process_time() - began_s


def splits(seed: int, steps: int = 0) -> list[EmulatedWorkload]:
    """Return a random job: with the planner, as it begins, and with two splits that stay."""
    job = shortened(draw_job(seed), steps)
    most = len(job.static_splits) - 1
    return [job, *(job.with_static_split(n) for n in sorted({0, most // 3, 2 * most // 3}))]


def shortened(job: EmulatedWorkload, steps: int) -> EmulatedWorkload:
    """Return the job with so many steps; 0: with its own."""
    return job.with_steps(steps) if steps else job


def virtual(tasks: Sequence[tuple[int, EmulatedWorkload]], processes: int) -> dict[str, Any]:
    errors, theirs_s, ours_s = [], 0.0, 0.0
    with ProcessPoolExecutor(min(processes, len(tasks)), get_context("spawn")) as pool:
        for seed, workload, step_s, cpu_s in pool.map(run_virtually, tasks):
            found_s, took_s = simulated(workload, seed)
            errors.append(found_s / step_s - 1)
            theirs_s, ours_s = theirs_s + cpu_s, ours_s + took_s
            split = "planner" if workload.allows_moves else f"{workload.hybrid_count} help"
            _print_deviation(f"{seed} {split}", found_s, step_s)
    return summed(errors) | {"speed_up": round(theirs_s / ours_s, 1)}


async def real(names: Sequence[str], steps: int) -> dict[str, Any]:
    errors, arms = [], []
    for name in names:
        job = shortened(JOBS[name], steps)
        for workload in (job.with_static_split(0), job.with_static_split(1)):
            arm = await run_real(f"{name}_{workload.hybrid_count}", workload, 0, MOST)
            arms.append(arm)
            found_s, _ = simulated(workload, 0, MOST)
            errors.append(found_s / (arm.rl_s / workload.steps) - 1)
            _print_deviation(arm.name, found_s, arm.rl_s / workload.steps)
    return summed(errors) | honest(arms)


def summed(errors: Sequence[float]) -> dict[str, float]:
    """Summarize relative step errors; positive if the simulated steps are longer."""
    return {
        "step_time_error": round(median(map(abs, errors)), 4),
        "step_time_bias": round(median(errors), 4),
    }


def _print_deviation(name: str, ours_s: float, theirs_s: float) -> None:
    print_progress(f"{name}: {ours_s:.3f} s, {theirs_s:.3f} s there")


def main() -> int:
    parser = options(
        __doc__,
        arms="virtual,broad,real",
        processes=2,
        jobs=("trained,even", "of the real mesh"),
        steps=(0, "of each job; 0: its own"),
        gangs=(BROAD.workers, "of the broad job"),
    )
    parser.add_argument("--seeds", default="0:8", metavar="A:B")
    a = parser.parse_args()
    first, _, last = a.seeds.partition(":")
    told: dict[str, Any] = {}
    arms = a.arms.split(",")
    if "virtual" in arms:
        tasks = [(s, w) for s in range(int(first), int(last)) for w in splits(s, a.steps)]
        told |= virtual(tasks, a.processes)
    if "broad" in arms:
        found = virtual([(0, shortened(broad(a.gangs), a.steps))], 1)
        told |= {f"broad_{key}": value for key, value in found.items()}
    if "real" in arms:
        found = asyncio.run(real(a.jobs.split(","), a.steps))
        told |= {f"real_{key}": value for key, value in found.items()}
    report(told)
    errors = [value for key, value in told.items() if key.endswith("step_time_error")]
    return 0 if max(errors) <= ERROR and told.get("real_valid", 1) else 1


if __name__ == "__main__":
    sys.exit(main())
