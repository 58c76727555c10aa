"""Model of a job: the measurements that its processes publish, for any given split.

Its rollout follows a fixed point that is found step by step, its stages a plain maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from meshrl.common.state.pool.demand.measurements import (
    QUANTILES,
    DecodeCurve,
    LengthQuantiles,
    MeasuredWork,
    Measurements,
)
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.workers.rows import Role, Tier
from tests.unit.planner.pools import PlannerBench

TRAJECTORIES, SLOTS = 128, 64


@dataclass
class Plant:
    """Simulated job; times in seconds."""

    base_s: float = 0.02  # of a decode step,
    sequence_s: float = 0.001  # and for each sequence in it
    tokens: float = 50.0  # of a trajectory
    tool_s: float = 0.0  # of a trajectory
    flight: float = 192.0  # trajectories in flight while rollout is the bottleneck
    work_s: float = 2.0  # gradients of a step, by one worker
    fixed_s: float = 0.1  # of a step
    drag: float = 1.0  # slowdown factor while a hybrid is present
    total: MeasuredWork = field(default_factory=MeasuredWork)

    def batch(self, engines: int) -> float:
        """Return the trajectories under way at each engine when rollout is the bottleneck."""
        batch = 1.0
        for _ in range(200):
            at_engine_s = self.tokens * (self.base_s + batch * self.sequence_s)
            share = at_engine_s / (at_engine_s + self.tool_s)
            batch = 0.5 * batch + 0.5 * min(SLOTS, self.flight * share / engines)
        return batch

    def stages(self, engines: int, trainers: int) -> tuple[float, float]:
        """Return (rollout_s, train_s) of a step."""
        batch = self.batch(engines)
        token_s = self.base_s + batch * self.sequence_s
        rollout_s = TRAJECTORIES * self.tokens * token_s / (engines * batch)
        train_s = self.fixed_s + self.work_s / trainers
        drag = self.drag if trainers > 1 else 1.0
        return rollout_s * drag, train_s * drag

    def step_s(self, engines: int, trainers: int) -> float:
        """Return the seconds of a step."""
        return max(self.stages(engines, trainers))

    def steps(self, count: int, engines: int, trainers: int) -> float:
        """Make `count` steps and return their duration in seconds."""
        rollout_s, train_s = self.stages(engines, trainers)
        step_s, batch = max(rollout_s, train_s), self.batch(engines)
        if rollout_s < step_s:  # engines are as busy as the trainer requires
            drag = self.drag if trainers > 1 else 1.0
            share = TRAJECTORIES * self.tokens * drag / step_s / engines
            batch = share * self.base_s / (1 - share * self.sequence_s)
        token_s = self.base_s + batch * self.sequence_s
        each = TRAJECTORIES * count
        self.total += MeasuredWork(
            steps=count,
            groups=16.0 * count,
            trajectories=each,
            sampled=each * self.tokens,
            flight_s=each * (self.tokens * token_s + self.tool_s),
            engine_s=each * self.tokens * token_s,
            tool_s=each * self.tool_s,
            busy_s=train_s * count,
            wait_s=(step_s - train_s) * count,
            work_s=self.work_s * count,
            tokens=each * self.tokens,
        )
        return step_s * count

    @property
    def measured(self) -> Measurements:
        """Return what the job's processes have published so far."""
        curve = DecodeCurve("cpu", 1, self.base_s, self.sequence_s, fitted_steps=1000)
        return Measurements({"everybody": self.total}, (curve,))


def run(
    bench: PlannerBench, plant: Plant, steps: int, job: str = "job", *, ready: bool = True
) -> None:
    """Take a snapshot after each of `steps` steps of the plant, with the current split."""
    for _ in range(steps):
        took_s = run_step(bench, plant, job)
        bench.update(now_ms=bench.snapshot.now_ms + round(1000 * max(took_s, 1.0)))
        bench.decide_once(ready)


def run_step(bench: PlannerBench, plant: Plant, job: str) -> float:
    """Make a step of the plant and return its duration in seconds."""
    took_s = plant.steps(1, *count_split(bench, job))
    before: PlannedJob = next(j for j in bench.snapshot.jobs if j.id == job)
    bench.update_job(job, measurements=plant.measured, steps_done=before.steps_done + 1)
    return took_s


def count_split(bench: PlannerBench, job: str = "job") -> tuple[int, int]:
    """Return (engines, training workers) of a job."""
    there = [r for _, r in bench.list_instances(job) if r.tier == Tier.ACCELERATOR]
    engines = sum(r.role == Role.ROLLOUT for r in there)
    return engines, sum(r.role == Role.TRAINING for r in there)


LONG = (*[100.0] * 120, *[4000.0] * 8)  # tokens: a few take most of a step
SHORT = (200.0,) * TRAJECTORIES


@dataclass
class LongTailPlant:
    """Simulated job whose trajectories are never stale; times in seconds."""

    sampled: Sequence[float] = LONG  # tokens of each trajectory of a step
    base_s: float = 0.01  # a decode step of one worker,
    sequence_s: float = 0.0002  # and for each sequence in it
    waits: float = 0.05  # of `base_s`, in collectives of several workers
    work_s: float = 2.0  # gradients of a step, by one worker
    drag: float = 1.0  # slowdown factor of a gang of several
    total: MeasuredWork = field(default_factory=MeasuredWork)
    steps: int = 0

    def curve(self, degree: int) -> DecodeCurve:
        """Return the decode curve of a gang of `degree` workers."""
        if degree == 1:
            return DecodeCurve(
                "cpu", 1, self.base_s, self.sequence_s, fitted_steps=100 + 300 * self.steps
            )
        base_s = self.drag * self.base_s * (1 / degree + self.waits)
        each_s = self.drag * self.sequence_s / degree
        return DecodeCurve("cpu", degree, base_s, each_s, fitted_steps=100 + 300 * self.steps)

    def rollout_s(self, degrees: Sequence[int]) -> float:
        """Return the rollout seconds of a step."""
        return max(self.ends(degrees))

    def ends(self, degrees: Sequence[int]) -> Sequence[float]:
        """Return when each trajectory of a step ends. The longest is assigned first, each to the
        gang that finishes it soonest.
        """
        curves = (replace(self.curve(degree), fitted_steps=0) for degree in degrees)
        return compute_ends(tuple(self.sampled), tuple(curves))

    def stages(self, degrees: Sequence[int], helpers: int) -> tuple[float, float]:
        """Return (rollout_s, train_s) of a step."""
        return self.rollout_s(degrees), 0.1 + self.work_s / (1 + helpers)

    def run_step(self, degrees: Sequence[int], helpers: int) -> float:
        """Make a step and return its seconds."""
        rollout_s, train_s = self.stages(degrees, helpers)
        step_s, n = rollout_s + train_s, len(self.sampled)
        flight_s = sum(self.ends(degrees))
        self.steps += 1
        self.total += MeasuredWork(
            steps=1,
            groups=16.0,
            trajectories=n,
            sampled=sum(self.sampled),
            flight_s=flight_s,
            engine_s=flight_s,
            busy_s=train_s,
            wait_s=rollout_s,
            work_s=self.work_s,
            tokens=sum(self.sampled),
        )
        return step_s

    def measured(self, degrees: Sequence[int]) -> Measurements:
        """Return what the job's processes have published so far."""
        curves = tuple(self.curve(degree) for degree in degrees)
        levels = tuple(float(one) for one in np.quantile(self.sampled, QUANTILES))
        return Measurements({"everybody": self.total}, curves, LengthQuantiles(512, levels, 50.0))


@cache
def compute_ends(sampled: tuple[float, ...], curves: tuple[DecodeCurve, ...]) -> Sequence[float]:
    """Return when each of the sampled trajectories ends at gangs with these curves."""
    dealt: list[list[float]] = [[] for _ in curves]
    for tokens in sorted(sampled, reverse=True):
        ends = [
            compute_ends_of_gang(curve, [*has, tokens])[-1]
            for curve, has in zip(curves, dealt, strict=True)
        ]
        dealt[ends.index(min(ends))].append(tokens)
    return [
        end
        for curve, has in zip(curves, dealt, strict=True)
        for end in compute_ends_of_gang(curve, has)
    ]


def compute_ends_of_gang(curve: DecodeCurve, has: Sequence[float]) -> list[float]:
    """Return, in rising order, when each trajectory of a gang ends that decodes `SLOTS` at a
    time.
    """
    at_s, done = 0.0, 0.0
    ordered, found = sorted(has), []
    for index, tokens in enumerate(ordered):
        batch = min(SLOTS, len(ordered) - index)
        at_s += (tokens - done) * curve.predict_step_s(batch)
        done = tokens
        found.append(at_s)
    return found


def degrees_of(bench: PlannerBench, job: str = "job") -> list[int]:
    """Return the degrees of the job's engines in falling order."""
    there = [r for _, r in bench.list_instances(job) if r.role == Role.ROLLOUT]
    return sorted((len(r.ranks) for r in there), reverse=True)


def helpers_of(bench: PlannerBench, job: str = "job") -> int:
    """Return the workers that train beside the job's core."""
    return sum(r.role == Role.TRAINING and not r.core for _, r in bench.list_instances(job))


def run_tall(
    bench: PlannerBench, plant: LongTailPlant, steps: int, job: str = "job", *, ready: bool = True
) -> None:
    """Take a snapshot after each of `steps` steps of the plant, with the current gangs."""
    for _ in range(steps):
        degrees = degrees_of(bench, job)
        took_s = plant.run_step(degrees, helpers_of(bench, job)) if degrees else 1.0
        before = next(j for j in bench.snapshot.jobs if j.id == job)
        bench.update_job(
            job, measurements=plant.measured(degrees), steps_done=before.steps_done + 1
        )
        bench.update(now_ms=bench.snapshot.now_ms + round(1000 * max(took_s, 1.0)))
        bench.decide_once(ready)
