"""The allocation of a job's accelerators to training and to gangs that generate: the one with the
shortest iteration, max(T_rollout, T_train) (Libra, arXiv 2606.03077, Global Resource Planner).

Libra enumerates ways to train and runs a dynamic programme over gangs for each. Here the time is
searched by bisection: a limit can be kept if some way to train keeps it and the accelerators that
it leaves can generate everything within it, for which one table of `search.py` is enough for all
ways. The result is the best of its family: gangs of powers of two within nodes, contiguous ranges
of lengths, within `tolerance` of the shortest time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meshrl.services.planner.costs.training import TrainingLayout
from meshrl.services.planner.layouts.nodes import LayoutNode, Pool, Supply, placed, supply, without
from meshrl.services.planner.layouts.search import (
    CELLS,
    Furthest,
    GangSpan,
    States,
    largest_degrees,
)
from meshrl.services.planner.layouts.serving import Served

TOLERANCE = 1e-4  # of the time; what is below is told apart by no measurement
NEVER = 1e18  # seconds

_Pools = frozenset[Pool]


@dataclass(frozen=True, slots=True)
class Timed:
    """A way to train, and the seconds of its step."""

    layout: TrainingLayout
    seconds: float


NO_TRAINING = Timed(TrainingLayout("", data=0), 0.0)  # where it is others' that are planned


@dataclass(frozen=True, slots=True)
class PlannedGang:
    """A gang that generates the trajectories of groups [first, end)."""

    kind: str
    degree: int
    place: str
    first: int
    end: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """What a job should have."""

    training: Timed
    trains_at: tuple[str, ...]  # the place of each unit of `tensor` accelerators
    gangs: tuple[PlannedGang, ...]  # in order of length
    exact: bool  # whether gangs were looked at one by one

    @property
    def train_s(self) -> float:
        """Seconds of a step's training."""
        return self.training.seconds

    @property
    def rollout_s(self) -> float:
        """Seconds in which the gangs generate a step's trajectories."""
        return max((gang.seconds for gang in self.gangs), default=0.0)

    @property
    def iteration_s(self) -> float:
        """Seconds of an asynchronous job's step."""
        return max(self.rollout_s, self.train_s)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to train, and what it leaves."""

    timed: Timed
    left: tuple[LayoutNode, ...]
    places: tuple[str, ...]
    supply: Supply


def allocate(
    ranges: Served,
    nodes: Sequence[LayoutNode],
    ways: Sequence[Timed],
    tolerance: float = TOLERANCE,
    limit: int = CELLS,
) -> LayoutPlan | None:
    """The plan with the shortest iteration; of equally short ones that which trains in less time,
    then on fewer accelerators. None when no way to train leaves gangs that can serve every group.
    """
    search = _Search(ranges, _ways(ranges, nodes, ways), limit)
    found = search.best(tolerance)
    if found is None:
        return None
    way, spans = found
    gangs = [ranges.kinds[span.server] for span in spans]
    places = placed(way.left, gangs)
    planned = (
        PlannedGang(*gang, place, span.first, span.end, _seconds(ranges, span))
        for gang, place, span in zip(gangs, places, spans, strict=True)
    )
    return LayoutPlan(way.timed, way.places, tuple(planned), search.exact)


def _ways(ranges: Served, nodes: Sequence[LayoutNode], ways: Sequence[Timed]) -> list[_Way]:
    """Ways to train that nodes have the accelerators for, the fastest of as many accelerators."""
    largest = largest_degrees(ranges.kinds)
    fastest: dict[tuple[str, int, int], Timed] = {}
    for timed in ways:
        key = (timed.layout.kind, timed.layout.workers, timed.layout.tensor)
        if key not in fastest or timed.seconds < fastest[key].seconds:
            fastest[key] = timed
    found = []
    for (kind, workers, tensor), timed in fastest.items():
        if not math.isfinite(timed.seconds):
            continue
        taken = without(nodes, kind, workers, tensor)
        if taken is not None and (left := supply(taken[0], largest)):
            found.append(_Way(timed, taken[0], tuple(taken[1]), left))
    return sorted(found, key=lambda way: (way.timed.seconds, way.timed.layout.workers))


class _Search:
    """Bisection over limits. What it holds: the limit, kept by `best`, is the least known one that
    can be kept."""

    def __init__(self, ranges: Served, ways: Sequence[_Way], limit: int) -> None:
        self.ranges, self.ways, self.limit = ranges, ways, limit
        self._states = self._of(limit)
        self.exact = all(states.exact for states in self._states.values())

    def best(self, tolerance: float) -> tuple[_Way, list[GangSpan]] | None:
        """The way to train and the gangs of the shortest iteration: the best found when no limit
        in between, further than `tolerance`, can be kept.
        """
        found = self._within(NEVER)
        if found is None:
            return None
        high = self._iteration_s(found)
        low = max(self.ways[0].timed.seconds * (1 - tolerance), high * 1e-6)
        while high > low * (1 + tolerance):
            middle = math.sqrt(low * high)
            better = self._within(middle)
            if better is None:
                low = middle
            else:
                found, high = better, min(middle, self._iteration_s(better))
        return found

    def _within(self, limit_s: float) -> tuple[_Way, list[GangSpan]] | None:
        """A way to train and gangs that keep a limit; None when there are none."""
        reach = cache(lambda server: self.ranges.reach(server, limit_s))
        tables: dict[int, Furthest] = {}
        for way in self.ways:
            if way.timed.seconds > limit_s:
                break
            of = self._states[frozenset(way.supply)]
            table = tables.get(id(of))
            if table is None:
                table = tables[id(of)] = Furthest(of, reach)
            state = of.of(way.supply)
            if table.end(state) >= self.ranges.groups:
                return way, table.spans(state)
        return None

    def _iteration_s(self, found: tuple[_Way, list[GangSpan]]) -> float:
        way, spans = found
        return max(way.timed.seconds, *(_seconds(self.ranges, span) for span in spans))

    def _of(self, limit: int) -> dict[_Pools, States]:
        """The states of each set of pools that ways to train leave something of, of no more than
        `limit` cells together. Where they would be more, ways that leave something of fewer pools
        are judged by the states of more.
        """
        most: dict[_Pools, Supply] = {}
        for way in self.ways:
            _widen(most.setdefault(frozenset(way.supply), {}), way.supply)
        kinds = self.ranges.kinds
        found = {key: States(of, kinds, limit) for key, of in most.items()}
        if sum(states.cells for states in found.values()) <= limit:
            return found
        widest = {key: max((k for k in most if key <= k), key=len) for key in most}
        for key, of in list(most.items()):
            _widen(most[widest[key]], of)
        each = limit // len(set(widest.values()))
        found = {key: States(most[key], kinds, each) for key in set(widest.values())}
        return {key: found[widest[key]] for key in most}


def _widen(most: Supply, by: Supply) -> None:
    for pool, count in by.items():
        most[pool] = max(most.get(pool, 0), count)


def _seconds(ranges: Served, span: GangSpan) -> float:
    return ranges.seconds(span.server, span.first, span.end)
