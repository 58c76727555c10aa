"""Runner of a scenario's arms, each on its own cluster. An arm with several settings runs each and
keeps the best.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.sim.cluster.cluster_builder import build_cluster
from meshrl.sim.cluster.job_figures import JobFigures, compute_figures
from meshrl.sim.cluster.model.cluster import SimCluster
from meshrl.sim.cluster.sources.scenario import Arm, ArmTable

PROGRESS_S = 3.0  # of CPU time between two lines about a simulation


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Result of an arm after the end of its jobs."""

    arm: ArmTable
    best_settings: str  # settings of the best candidate; empty: the only one
    cluster: SimCluster  # of the best candidate
    figures: dict[str, JobFigures]  # by job
    cpu_s: float  # of all candidates


def run_arm(arm: Arm, base: Path, finished_clusters: dict[str, SimCluster]) -> ArmResult:
    """Run an arm; relative paths of its scenario start at `base`. `finished_clusters` are clusters
    that have run, by their scenario: none runs twice.
    """
    began_s = time.process_time()
    found: tuple[str, SimCluster] | None = None
    ends: list[list[float]] = []
    for chosen, scenario in arm.scenarios.items():
        cluster = finished_clusters.get(repr(scenario))
        if cluster is None:
            cluster = finished_clusters[repr(scenario)] = build_cluster(scenario, base)
            cluster.run(scenario.until_s, _ProgressPrinter(arm.table.name, chosen, cluster))
        if arm.table.stretches:
            ends.append(_read_step_ends(arm.table.name, cluster))
        if chosen:
            print(
                f"{arm.table.name}: {chosen}: {_compute_step_s(cluster):.4g} s/step",
                file=sys.stderr,
            )
        measure = _compute_token_cost if arm.table.cheapest else _compute_step_s
        if found is None or measure(cluster) < measure(found[1]):
            found = chosen, cluster
    assert found is not None
    chosen, cluster = found
    figures = {name: compute_figures(cluster, job) for name, job in cluster.jobs.items()}
    if ends:
        name, one = next(iter(figures.items()))
        figures = {name: _scale_to_stretches(one, ends, arm.table.stretches)}
        chosen = f"the best of {len(ends)} in each of {arm.table.stretches} parts"
    return ArmResult(arm.table, chosen, cluster, figures, time.process_time() - began_s)


class _ProgressPrinter:
    """Printer of a simulation's steps, on standard error, for one that takes long."""

    def __init__(self, arm: str, settings: str, cluster: SimCluster) -> None:
        self._name = ": ".join(filter(None, (arm, settings)))
        self._cluster, self._next_s = cluster, time.process_time() + PROGRESS_S

    def __call__(self) -> None:
        if time.process_time() < self._next_s:
            return
        self._next_s = time.process_time() + PROGRESS_S
        jobs = self._cluster.jobs.values()
        steps = ", ".join(f"{j.spec.name} step {j.training.version}/{j.spec.steps}" for j in jobs)
        now_s = self._cluster.event_queue.now_s
        print(f"{self._name}: {steps}, after {now_s:.0f} simulated s", file=sys.stderr, flush=True)


def _compute_step_s(cluster: SimCluster) -> float:
    """Compute the seconds of a step, of all jobs together."""
    every = [compute_figures(cluster, job) for job in cluster.jobs.values()]
    return sum(one.step_s if one.steps else cluster.event_queue.now_s for one in every)


def _compute_token_cost(cluster: SimCluster) -> float:
    """Compute the cost of a trained token of the first job; infinite without prices or steps."""
    first = compute_figures(cluster, next(iter(cluster.jobs.values())))
    return 1 / first.trained_per_cost if first.trained_per_cost else math.inf


def _read_step_ends(arm: str, cluster: SimCluster) -> list[float]:
    if len(cluster.jobs) != 1:
        raise ConfigError(
            f"arm {arm} has stretches, which allow only one job", fix="Define one job"
        )
    (job,) = cluster.jobs.values()
    if not job.training.is_finished:
        why = cluster.get_block_reason(job.spec.name) or (
            f"it completed {job.training.version} steps"
        )
        raise ConfigError(f"arm {arm} did not finish: {why}", fix="Raise until_s")
    return [job.training_started_s or 0.0, *job.training.step_ends_s]


def _scale_to_stretches(one: JobFigures, ends: Sequence[Sequence[float]], count: int) -> JobFigures:
    """Scale the figures to the fastest candidate in each part of the run."""
    cuts = [round(n * one.steps / count) for n in range(count + 1)]
    rl_s = sum(min(at[b] - at[a] for at in ends) for a, b in pairwise(cuts) if b > a)
    faster = one.rl_s / rl_s
    return replace(
        one,
        rl_s=rl_s,
        step_s=one.step_s / faster,
        sampled_per_s=one.sampled_per_s * faster,
        trained_per_s=one.trained_per_s * faster,
    )
