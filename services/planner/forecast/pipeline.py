"""Plays a job's steps ahead: groups of trajectories of drawn lengths go through engines, tools and
the trainer, as the staleness gate admits them.

What a mean cannot say decides where lengths have a long tail: a step waits for whole groups, so for
the longest of their trajectories, while engines run empty and the trainer waits, or groups wait for
the trainer. The draws are the same for every split, so that splits are compared and not chances.

A job with more trajectories is thinned out: so many engines fewer have as many trajectories each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

from meshrl.common.state.pool.demand.measured import LEVELS
from meshrl.services.planner.forecast.quantities import Demand, Split, StepRates, StepTerms, share

TRAJECTORIES = 800  # that are played in all, and
STEPS = 9, 36  # the steps that they are, at least and at most
BROAD = 64  # trajectories of a step from which it is thinned out

Group = tuple[tuple[float, ...], float]  # tokens of each member over the mean, and their sum


def played_s(now: Demand, then: StepRates, split: Split, terms: StepTerms) -> float:
    """Seconds of a step, in the mean, with engines and trainers at these rates."""
    thin = max(1.0, terms.groups * terms.group_size / BROAD)
    groups = max(1, round(terms.groups / thin))
    steps = int(min(max(TRAJECTORIES / (groups * terms.group_size), STEPS[0]), STEPS[1]))
    lag = terms.max_staleness
    steps = max(steps, 2 * (lag + 1))
    drawn = _drawn(now.shape, groups * (steps + lag + 1), terms.group_size)
    return _Play(now, then, split, terms, drawn, groups).mean_s(steps)


class _Play:
    """One run of the steps. Engines are alike and equally loaded: a trajectory gets as far as any
    other that is at one.
    """

    def __init__(
        self,
        now: Demand,
        then: StepRates,
        split: Split,
        terms: StepTerms,
        drawn: Sequence[Group],
        groups: int,
    ) -> None:
        self._now, self._then, self._terms = now, then, terms
        self._split, self._groups, self._drawn = split, groups, drawn
        self._engines = split.engines * split.width * groups / terms.groups
        self._t = 0.0  # seconds,
        self._far = 0.0  # and tokens that a trajectory which was always there would have by now
        self._there: list[tuple[float, int]] = []  # at engines: how far, and of which group
        self._due: list[tuple[float, int, float]] = []  # tools that end: when, group, tokens
        self._missing: list[int] = []  # of each group that was opened: members under way,
        self._born: list[int] = []  # and the version that it began with
        self._ready: deque[int] = deque()
        self._version = 0
        self._trains = math.inf  # until when
        self._paces: dict[int, float] = {}  # tokens a second of each, by how many are at engines

    def mean_s(self, steps: int) -> float:
        """Seconds of a step, after the first ones. As many as the gate lets go on together may end
        together, so that whole rounds of them are counted.
        """
        lag = self._terms.max_staleness
        self._open((lag + 1) * self._groups)
        ends: list[float] = []
        while len(ends) < steps:
            if self._trains == math.inf and len(self._ready) >= self._groups:
                self._trains = self._t + self._train_s()
            self._next()
            if self._t >= self._trains:
                self._trains = math.inf
                ends.append(self._t)
                self._version += 1
                old = [group for group in self._ready if self._stale(group)]
                for group in old:
                    self._ready.remove(group)
                self._open(self._groups + len(old))
        counted = (steps - 1 - lag) // (lag + 1) * (lag + 1)
        return (ends[-1] - ends[-1 - counted]) / counted

    def _next(self) -> None:
        there, due = self._there, self._due
        until = min(self._trains, due[0][0] if due else math.inf)
        if there:
            pace = self._pace(len(there))
            ends = self._t + (there[0][0] - self._far) / pace
            if ends <= until:
                self._t, self._far = ends, there[0][0]
                self._end(heappop(there)[1])
                return
            self._far += (until - self._t) * pace
        self._t = until
        if due and due[0][0] <= until:
            _, group, tokens = heappop(due)
            heappush(there, (self._far + tokens, group))

    def _open(self, groups: int) -> None:
        mean, tool_s = self._now.sampled, self._now.tool_s
        for group in range(len(self._born), len(self._born) + groups):
            members = self._drawn[group % len(self._drawn)][0]
            self._born.append(self._version)
            self._missing.append(len(members))
            for tokens in members:
                if tool_s > 0:
                    heappush(self._due, (self._t + tool_s, group, mean * tokens))
                else:
                    heappush(self._there, (self._far + mean * tokens, group))

    def _end(self, group: int) -> None:
        self._missing[group] -= 1
        if self._missing[group]:
            return
        if self._stale(group):  # its prompt is sampled anew
            self._open(1)
        else:
            self._ready.append(group)

    def _stale(self, group: int) -> bool:
        return self._version - self._born[group] > self._terms.max_staleness

    def _train_s(self) -> float:
        taken = [self._ready.popleft() for _ in range(self._groups)]
        members = self._groups * self._terms.group_size
        drawn = self._drawn
        more = sum(drawn[group % len(drawn)][1] for group in taken) / members
        part = share(self._split.trainers, more * self._now.trained, self._terms)
        return self._then.fixed_s + more * self._then.work_s * part

    def _pace(self, there: int) -> float:
        known = self._paces.get(there)
        if known is None:
            slots = float(self._terms.slots)
            batch = max(1.0, there / self._engines)
            token_s = self._then.friction * self._then.curve.step_s(min(batch, slots))
            known = self._split.speed * min(1.0, slots / batch) / max(token_s, 1e-9)
            self._paces[there] = known
        return known


@lru_cache(maxsize=64)
def _drawn(shape: tuple[float, ...], groups: int, size: int) -> tuple[Group, ...]:
    """Groups of trajectories; a shape is tokens at each of `LEVELS`; empty: all are alike."""
    if not shape:
        return (((1.0,) * size, float(size)),) * groups
    random = np.random.default_rng(1)
    tokens = np.interp(random.random((groups, size)), LEVELS, shape)
    tokens /= max(float(tokens.mean()), 1e-9)
    return tuple((tuple(map(float, members)), float(members.sum())) for members in tokens)
