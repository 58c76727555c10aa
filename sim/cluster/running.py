"""Runs the arms of a scenario: each on a cluster of its own, and of one that is the best of several
settings each of those.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.sim.cluster.building import cluster_of
from meshrl.sim.cluster.figures import Figures, figures_of
from meshrl.sim.cluster.model.cluster import Cluster
from meshrl.sim.cluster.sources.scenario import Arm, ArmTable


@dataclass(frozen=True, slots=True)
class RanArm:
    """An arm when its jobs are over."""

    about: ArmTable
    chosen: str  # what is set in the best of its tries; empty: there was one
    cluster: Cluster  # of that
    figures: dict[str, Figures]  # by job
    cpu_s: float  # of all tries


def run(arm: Arm, base: Path, known: dict[str, Cluster]) -> RanArm:
    """Runs an arm; files that its scenario names relatively lie in `base`. `known` are clusters
    that have run, by their scenario: none runs twice.
    """
    began_s = time.process_time()
    found: tuple[str, Cluster] | None = None
    ends: list[list[float]] = []
    for chosen, scenario in arm.tries.items():
        cluster = known.get(repr(scenario))
        if cluster is None:
            cluster = known[repr(scenario)] = cluster_of(scenario, base)
            cluster.run(scenario.until_s)
        if arm.about.stretches:
            ends.append(_ends(arm.about.name, cluster))
        if chosen:
            print(f"{arm.about.name}: {chosen}: {_pace(cluster):.4g} s/step", file=sys.stderr)
        if found is None or _pace(cluster) < _pace(found[1]):
            found = chosen, cluster
    assert found is not None
    chosen, cluster = found
    figures = {name: figures_of(cluster, job) for name, job in cluster.jobs.items()}
    if ends:
        name, one = next(iter(figures.items()))
        figures = {name: _stretched(one, ends, arm.about.stretches)}
        chosen = f"the best of {len(ends)} in each of {arm.about.stretches} parts"
    return RanArm(arm.about, chosen, cluster, figures, time.process_time() - began_s)


def _pace(cluster: Cluster) -> float:
    """Seconds of a step, of all jobs together."""
    every = [figures_of(cluster, job) for job in cluster.jobs.values()]
    return sum(one.step_s if one.steps else cluster.agenda.now_s for one in every)


def _ends(arm: str, cluster: Cluster) -> list[float]:
    if len(cluster.jobs) != 1:
        raise ConfigError(f"arm {arm} has stretches, and several jobs", fix="Give it one job")
    (job,) = cluster.jobs.values()
    if not job.training.over:
        why = cluster.held(job.spec.name) or f"it made {job.training.version} steps"
        raise ConfigError(f"arm {arm} did not end: {why}", fix="Raise until_s")
    return [job.began_s or 0.0, *job.training.ended_s]


def _stretched(one: Figures, ends: Sequence[Sequence[float]], count: int) -> Figures:
    """The figures of one that is as fast as the fastest in each part of the run."""
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
