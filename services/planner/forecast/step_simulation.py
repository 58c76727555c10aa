"""Simulation of a job's steps: groups of trajectories with drawn lengths pass through engines,
tools and the trainer. The staleness gate admits them.

A mean is not enough for lengths with a long tail. A step waits for whole groups, so for their
longest trajectories. Then engines run empty and the trainer waits, or groups wait for the trainer.
The draws are the same for every split, so that a comparison of splits has no sampling noise.

A job with more trajectories is scaled down: proportionally fewer engines have as many trajectories
each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from meshrl.common.state.pool.demand.measurements import QUANTILES
from meshrl.services.planner.forecast.step_quantities import (
    StepDemand,
    StepRates,
    StepTerms,
    WorkerSplit,
    compute_slice_shares,
    predict_gradients_s,
)

MAX_TRAJECTORIES = 800  # maximum number of simulated trajectories, and
STEP_BOUNDS = 9, 36  # minimum and maximum number of simulated steps
MAX_STEP_TRAJECTORIES = 64  # trajectories of a step above which the simulation is scaled down

DrawnGroup = tuple[tuple[float, ...], float]  # tokens of each member over the mean, and their sum


@lru_cache(maxsize=256)  # several decisions of a pass simulate the same split
def simulate_step_s(
    demand: StepDemand, rates: StepRates, split: WorkerSplit, terms: StepTerms
) -> float:
    """Simulate the mean seconds of a step with engines and trainers at these rates."""
    simulation, steps = _build_simulation(demand, rates, split, terms)
    return simulation.simulate_mean_step_s(steps)


def simulate_token_s(
    demand: StepDemand, rates: StepRates, split: WorkerSplit, terms: StepTerms
) -> float:
    """Simulate the mean seconds of a token at an engine, with all pauses."""
    simulation, steps = _build_simulation(demand, rates, split, terms)
    simulation.simulate_mean_step_s(steps)
    return simulation.engine_s / max(simulation.generated_tokens, 1e-9)


def _build_simulation(
    demand: StepDemand, rates: StepRates, split: WorkerSplit, terms: StepTerms
) -> tuple[_StepSimulation, int]:
    """Return the simulation of a job's steps, and the number of steps that it takes."""
    thin = max(1.0, terms.groups_per_step * terms.group_size / MAX_STEP_TRAJECTORIES)
    groups = max(1, round(terms.groups_per_step / thin))
    steps = int(
        min(max(MAX_TRAJECTORIES / (groups * terms.group_size), STEP_BOUNDS[0]), STEP_BOUNDS[1])
    )
    lag = terms.max_staleness
    steps = max(steps, 2 * (lag + 1))
    drawn = _draw_groups(demand.length_quantiles, groups * (steps + lag + 1), terms.group_size)
    return _StepSimulation(demand, rates, split, terms, drawn, groups), steps


class _StepSimulation:
    """Simulation run of a job's steps. Engines are equal and equally loaded, so all active
    trajectories progress at one rate.
    """

    def __init__(
        self,
        demand: StepDemand,
        rates: StepRates,
        split: WorkerSplit,
        terms: StepTerms,
        drawn_groups: Sequence[DrawnGroup],
        groups_per_step: int,
    ) -> None:
        self._demand, self._rates, self._terms = demand, rates, terms
        self._split, self._groups_per_step, self._drawn_groups = (
            split,
            groups_per_step,
            drawn_groups,
        )
        self._engine_count = (
            split.engines * split.relative_width * groups_per_step / terms.groups_per_step
        )
        self.engine_s = 0.0  # seconds of all trajectories in slots of engines,
        self.generated_tokens = 0.0  # and their tokens
        self._time_s = 0.0  # seconds,
        self._progress_tokens = 0.0  # and tokens of a trajectory that was always active
        self._at_engines: list[tuple[float, int]] = []  # at engines: (progress at its end, group)
        self._in_tools: list[tuple[float, int, float]] = []  # in tools: (end time, group, tokens)
        self._unfinished_members: list[int] = []  # by group: members in progress,
        self._start_versions: list[int] = []  # and the version at its start
        self._ready_groups: deque[int] = deque()
        self._version = 0
        self._training_until_s = math.inf  # end of the current training
        self._token_rates: dict[int, float] = {}  # tokens per second of each, by number at engines
        self._slices = compute_slice_shares(rates.gradient_s, demand.trained_tokens, terms)
        # share of all engines' time during training: shared engines have only their slices
        shared = split.shared_engines / max(1, split.engines)
        self._pace_in_training = 1.0 - shared * (1.0 - self._slices.engine)

    def simulate_mean_step_s(self, steps: int) -> float:
        """Simulate the mean seconds of a step after the first ones. Whole rounds of the gate are
        counted, as groups admitted together may end together.
        """
        lag = self._terms.max_staleness
        self._open_groups((lag + 1) * self._groups_per_step)
        ends: list[float] = []
        while len(ends) < steps:
            if (
                self._training_until_s == math.inf
                and len(self._ready_groups) >= self._groups_per_step
            ):
                self._training_until_s = self._time_s + self._start_training()
            self._advance()
            if self._time_s >= self._training_until_s:
                self._training_until_s = math.inf
                ends.append(self._time_s)
                self._version += 1
                old = [group for group in self._ready_groups if self._is_stale(group)]
                for group in old:
                    self._ready_groups.remove(group)
                self._open_groups(self._groups_per_step + len(old))
        counted = (steps - 1 - lag) // (lag + 1) * (lag + 1)
        return (ends[-1] - ends[-1 - counted]) / counted

    def _advance(self) -> None:
        there, due = self._at_engines, self._in_tools
        until = min(self._training_until_s, due[0][0] if due else math.inf)
        if there:
            pace = self._compute_token_rate(len(there))
            if self._training_until_s < math.inf:
                pace *= self._pace_in_training
            ends = self._time_s + (there[0][0] - self._progress_tokens) / pace
            spent_s, slots = min(ends, until) - self._time_s, self._terms.engine_slots
            self.engine_s += min(len(there), slots * self._engine_count) * spent_s
            self.generated_tokens += len(there) * spent_s * pace
            if ends <= until:
                self._time_s, self._progress_tokens = ends, there[0][0]
                self._finish_member(heappop(there)[1])
                return
            self._progress_tokens += (until - self._time_s) * pace
        self._time_s = until
        if due and due[0][0] <= until:
            _, group, tokens = heappop(due)
            heappush(there, (self._progress_tokens + tokens, group))

    def _open_groups(self, groups: int) -> None:
        mean, tool_s = self._demand.sampled_tokens, self._demand.tool_s
        for group in range(len(self._start_versions), len(self._start_versions) + groups):
            members = self._drawn_groups[group % len(self._drawn_groups)][0]
            self._start_versions.append(self._version)
            self._unfinished_members.append(len(members))
            for tokens in members:
                if tool_s > 0:
                    heappush(self._in_tools, (self._time_s + tool_s, group, mean * tokens))
                else:
                    heappush(self._at_engines, (self._progress_tokens + mean * tokens, group))

    def _finish_member(self, group: int) -> None:
        self._unfinished_members[group] -= 1
        if self._unfinished_members[group]:
            return
        if self._is_stale(group):  # its prompt is sampled again
            self._open_groups(1)
        else:
            self._ready_groups.append(group)

    def _is_stale(self, group: int) -> bool:
        return self._version - self._start_versions[group] > self._terms.max_staleness

    def _start_training(self) -> float:
        step_groups = [self._ready_groups.popleft() for _ in range(self._groups_per_step)]
        members = self._groups_per_step * self._terms.group_size
        drawn = self._drawn_groups
        more = sum(drawn[group % len(drawn)][1] for group in step_groups) / members
        train_s = self._rates.fixed_s + predict_gradients_s(
            more * self._rates.gradient_s,
            self._split.trainers,
            more * self._demand.trained_tokens,
            self._terms,
        )
        if not self._split.shared_engines:
            return train_s
        is_generating = bool(self._at_engines or self._in_tools)
        switches_s = 0.0 if is_generating else 2 * self._terms.switch_s
        return train_s / (self._slices.core if is_generating else 1.0) + switches_s

    def _compute_token_rate(self, active: int) -> float:
        known = self._token_rates.get(active)
        if known is None:
            slots = float(self._terms.engine_slots)
            batch = max(1.0, active / self._engine_count)
            token_s = self._rates.friction * self._rates.curve.predict_step_s(min(batch, slots))
            known = self._split.relative_speed * min(1.0, slots / batch) / max(token_s, 1e-9)
            self._token_rates[active] = known
        return known


@lru_cache(maxsize=64)
def _draw_groups(
    length_quantiles: tuple[float, ...], groups: int, group_size: int
) -> tuple[DrawnGroup, ...]:
    """Draw groups of trajectories. `length_quantiles` has tokens at each of `QUANTILES`; empty:
    equal lengths.
    """
    if not length_quantiles:
        return (((1.0,) * group_size, float(group_size)),) * groups
    random = np.random.default_rng(1)
    tokens = np.interp(random.random((groups, group_size)), QUANTILES, length_quantiles)
    tokens /= max(float(tokens.mean()), 1e-9)
    return tuple((tuple(map(float, members)), float(members.sum())) for members in tokens)
