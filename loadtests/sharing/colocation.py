"""Colocated mode against the split and against the planner's choice, on simulated accelerators.

Each case is one job with emulated speeds on the modelled cluster (`meshrl.sim.cluster`), which
calls the planner's policies. Rollout on one engine takes `RATIOS` times as long as training on one
worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from loadtests.measuring.entry import print_progress
from loadtests.regret.drawn import sampled_tokens, trained_tokens
from loadtests.regret.figures import quantile
from loadtests.simulator.__main__ import spec_of
from meshrl.common.job.emulation import parse_engine_speed
from meshrl.common.state.pool.demand.requirements import JobRequirements
from meshrl.sim.cluster.model.cluster import SimCluster, SimHosts
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload, constant_drift

ACCELERATORS = (1, 2, 4)
RATIOS = (4.0, 1.0, 0.25)
STALENESS = (0, 2)  # synchronous, and as by default
SWITCH_S = 0.02  # of a switch between slices, where the accelerator does not hold both
STEPS = 96
MAX_TIME_S = 1e6
MODES = ("always", "never", "auto")


@dataclass(frozen=True, slots=True)
class ColocationCase:
    """Job on a number of accelerators."""

    accelerators: int
    ratio: float  # of the seconds of rollout to those of training, each on one worker
    staleness: int
    seed: int


@dataclass(frozen=True, slots=True)
class ColocationResult:
    """Seconds of a case's run by mode; the split needs two accelerators."""

    case: ColocationCase
    run_s: dict[str, float]
    final_modes: str  # mode that the planner ends in

    @property
    def regret(self) -> float:
        """Excess of the planner's choice over the better mode."""
        best_s = min(seconds for mode, seconds in self.run_s.items() if mode != "auto")
        return self.run_s["auto"] / best_s - 1


def measure_colocation(seeds: int, steps: int = STEPS) -> dict[str, Any]:
    """Return flat figures of all cases, each with `seeds` seeds."""
    results = [_run_case(case, steps) for case in _list_cases(seeds)]
    regrets = sorted(max(0.0, one.regret) for one in results)
    figures: dict[str, Any] = {
        "colocate_cases": len(results),
        "auto_regret_p90": quantile(regrets, 0.9),
        "auto_regret_median": quantile(regrets, 0.5),
        "auto_regret_max": round(regrets[-1], 4),
    }
    for accelerators, ratio in product(ACCELERATORS[1:], RATIOS):
        gains = [
            one.run_s["never"] / one.run_s["always"]
            for one in results
            if (one.case.accelerators, one.case.ratio) == (accelerators, ratio)
        ]
        name = f"colocated_speedup_{accelerators}_accelerators_ratio_{ratio:g}"
        figures[name] = round(median(gains), 3)
    return figures


def _list_cases(seeds: int) -> Iterator[ColocationCase]:
    for accelerators, ratio, staleness, seed in product(
        ACCELERATORS, RATIOS, STALENESS, range(seeds)
    ):
        yield ColocationCase(accelerators, ratio, staleness, seed)


def _run_case(case: ColocationCase, steps: int) -> ColocationResult:
    modes = MODES if case.accelerators > 1 else ("always", "auto")
    runs = {mode: _run_mode(case, mode, steps) for mode in modes}
    found = ColocationResult(
        case, {mode: seconds for mode, (seconds, _) in runs.items()}, runs["auto"][1]
    )
    times = ", ".join(f"{mode} {seconds:.0f} s" for mode, seconds in found.run_s.items())
    print_progress(f"{case}: {times}, regret {found.regret:.3f}, ends {found.final_modes}")
    return found


def _run_mode(case: ColocationCase, mode: str, steps: int) -> tuple[float, str]:
    """Return the seconds of a run, and the mode in which it ends."""
    spec = spec_of(_build_workload(case, steps), case.seed)
    spec = replace(
        spec,
        max_staleness=case.staleness,
        slice_switch_s=SWITCH_S,
        requirements=JobRequirements(colocate=mode, can_time_slice=mode != "never"),
    )
    cluster = SimCluster([SimHosts(1, case.accelerators)], [spec], has_time_slices=True)
    cluster.run(MAX_TIME_S)
    job = cluster.jobs["job"]
    if not job.training.is_finished or job.training_started_s is None:
        raise RuntimeError(f"{case}, pool.colocate = {mode}: the job did not end")
    shared = bool(job.training.sliced_engines)
    return job.training.step_ends_s[-1], "colocated" if shared else "split"


def _build_workload(case: ColocationCase, steps: int) -> EmulatedWorkload:
    """Return a job whose training on one worker takes 1 / ratio of its rollout on one engine."""
    job = EmulatedWorkload(
        workers=case.accelerators,
        steps=steps,
        log_sigma=constant_drift(0.4),
        engine_speed="50/8/4000",
    )
    pace = parse_engine_speed(job.engine_speed)
    trajectories = job.groups_per_step * job.group_size
    batches = max(1.0, trajectories / pace.plateau_batch)
    rollout_s = sampled_tokens(job) * pace.decode_step_s * batches
    tokens_per_s = trained_tokens(job) * case.ratio / rollout_s
    return job.with_training_speed(f"{tokens_per_s:.0f}/50")
