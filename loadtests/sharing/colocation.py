"""Colocated mode against the split and against the planner's choice, on simulated accelerators.

Each case is one job with emulated speeds on the modelled cluster (`meshrl.sim.cluster`), which
calls the planner's policies. Rollout on one engine takes `RATIOS` times as long as training on one
worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def describe(self) -> str:
        """Describe the case and its seconds by mode."""
        times = ", ".join(f"{mode} {seconds:.4g} s" for mode, seconds in self.run_s.items())
        return f"{self.case}: {times}, regret {self.regret:.3f}, ends {self.final_modes}"


def measure_colocation(seeds: int, steps: int = STEPS) -> dict[str, Any]:
    """Return flat figures of all cases, each with `seeds` seeds."""
    results = [_run_case(case, steps) for case in _list_cases(seeds)]
    return {"colocate_cases": len(results)} | summarize(results)


def summarize(results: Sequence[ColocationResult]) -> dict[str, Any]:
    """Return the planner's regret, and the speedups of the colocated mode."""
    regrets = sorted(max(0.0, one.regret) for one in results)
    figures: dict[str, Any] = {
        "auto_regret_p90": quantile(regrets, 0.9),
        "auto_regret_median": quantile(regrets, 0.5),
        "auto_regret_max": round(regrets[-1], 4),
    }
    gains: dict[str, list[float]] = {}
    for one in results:
        if "never" in one.run_s:
            case = f"{one.case.accelerators}_accelerators_ratio_{one.case.ratio:g}"
            gain = one.run_s["never"] / one.run_s["always"]
            gains.setdefault(f"colocated_speedup_{case}", []).append(gain)
    return figures | {name: round(median(values), 3) for name, values in gains.items()}


def _list_cases(seeds: int) -> Iterator[ColocationCase]:
    for accelerators, ratio, staleness, seed in product(
        ACCELERATORS, RATIOS, STALENESS, range(seeds)
    ):
        yield ColocationCase(accelerators, ratio, staleness, seed)


def list_modes(case: ColocationCase) -> Sequence[str]:
    """Return the modes that a job can have on so many accelerators."""
    return MODES if case.accelerators > 1 else ("always", "auto")


def _run_case(case: ColocationCase, steps: int) -> ColocationResult:
    runs = {mode: _run_mode(case, mode, steps) for mode in list_modes(case)}
    found = ColocationResult(
        case, {mode: seconds for mode, (seconds, _) in runs.items()}, runs["auto"][1]
    )
    print_progress(found.describe())
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
    job = EmulatedWorkload(
        workers=case.accelerators,
        steps=steps,
        log_sigma=constant_drift(0.4),
        engine_speed="50/8/4000",
    )
    return set_training_speed(job, case.ratio, predict_rollout_s(job))


def predict_rollout_s(job: EmulatedWorkload) -> float:
    """Predict the seconds of a step's rollout on one engine."""
    pace = parse_engine_speed(job.engine_speed)
    batches = max(1.0, job.groups_per_step * job.group_size / pace.plateau_batch)
    return sampled_tokens(job) * pace.decode_step_s * batches


def set_training_speed(job: EmulatedWorkload, ratio: float, rollout_s: float) -> EmulatedWorkload:
    """Return a job whose training on one worker takes 1 / ratio of its rollout on one engine."""
    return job.with_training_speed(f"{trained_tokens(job) * ratio / rollout_s:.0f}/50")
