"""Allocation of a job's accelerators to training and to generating gangs, with the shortest
iteration. Its time is max(T_rollout, T_train) (Libra, arXiv 2606.03077, Global Resource
Planner).

Libra enumerates training options and runs a dynamic programme over gangs for each. Here the time is
found by bisection. A limit is feasible if some training option meets it and the remaining
accelerators can generate everything within it. One table of `range_search.py` answers this for all
options. The result is the best of its family: gangs of powers of two within nodes, contiguous
ranges of lengths, within `tolerance` of the shortest time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meshrl.services.planner.costs.training_costs import TrainingLayout
from meshrl.services.planner.layouts.layout_nodes import (
    AcceleratorPool,
    LayoutNode,
    Supply,
    count_supply,
    place_gangs,
    take_accelerators,
)
from meshrl.services.planner.layouts.range_costs import RangeCosts
from meshrl.services.planner.layouts.range_search import (
    MAX_CELLS,
    FurthestTable,
    GangSpan,
    SupplyStates,
    find_largest_degrees,
)

TOLERANCE = 1e-4  # relative; smaller differences are not measurable
MAX_SECONDS = 1e18  # seconds

_PoolSet = frozenset[AcceleratorPool]


@dataclass(frozen=True, slots=True)
class TrainingOption:
    """Training layout with the seconds of its step."""

    layout: TrainingLayout
    train_s: float


NO_TRAINING = TrainingOption(TrainingLayout("", data_parallel=0), 0.0)  # for plans of rollout alone


@dataclass(frozen=True, slots=True)
class PlannedGang:
    """Gang that generates the trajectories of groups [first, end)."""

    kind: str
    degree: int
    place: str
    first: int
    end: int
    rollout_s: float


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Planned layout of a job."""

    training_option: TrainingOption
    training_places: tuple[str, ...]  # the place of each unit of `tensor_parallel` accelerators
    gangs: tuple[PlannedGang, ...]  # in order of length
    is_exact: bool  # True if gangs were examined one by one

    @property
    def train_s(self) -> float:
        """Seconds of a step's training."""
        return self.training_option.train_s

    @property
    def rollout_s(self) -> float:
        """Seconds in which the gangs generate a step's trajectories."""
        return max((gang.rollout_s for gang in self.gangs), default=0.0)

    @property
    def iteration_s(self) -> float:
        """Seconds of an asynchronous job's step."""
        return max(self.rollout_s, self.train_s)


@dataclass(frozen=True, slots=True)
class _TrainingCandidate:
    """Training option with the accelerators that it leaves."""

    option: TrainingOption
    remaining_nodes: tuple[LayoutNode, ...]
    training_places: tuple[str, ...]
    supply: Supply


def allocate(
    range_costs: RangeCosts,
    nodes: Sequence[LayoutNode],
    options: Sequence[TrainingOption],
    tolerance: float = TOLERANCE,
    max_cells: int = MAX_CELLS,
) -> LayoutPlan | None:
    """Find the plan with the shortest iteration. Of equal ones prefer less training time, then
    fewer training accelerators. Return None if no option leaves gangs that can serve every
    group.
    """
    search = _AllocationSearch(
        range_costs, _list_candidates(range_costs, nodes, options), max_cells
    )
    found = search.find_best(tolerance)
    if found is None:
        return None
    way, spans = found
    gangs = [range_costs.kinds[span.server] for span in spans]
    places = place_gangs(way.remaining_nodes, gangs)
    planned = (
        PlannedGang(*gang, place, span.first, span.end, _predict_span_s(range_costs, span))
        for gang, place, span in zip(gangs, places, spans, strict=True)
    )
    return LayoutPlan(way.option, way.training_places, tuple(planned), search.is_exact)


def _list_candidates(
    range_costs: RangeCosts, nodes: Sequence[LayoutNode], options: Sequence[TrainingOption]
) -> list[_TrainingCandidate]:
    """List the training options that fit on the nodes, the fastest for each number of
    accelerators.
    """
    largest = find_largest_degrees(range_costs.kinds)
    fastest: dict[tuple[str, int, int], TrainingOption] = {}
    for timed in options:
        key = (timed.layout.kind, timed.layout.workers, timed.layout.tensor_parallel)
        if key not in fastest or timed.train_s < fastest[key].train_s:
            fastest[key] = timed
    found = []
    for (kind, workers, tensor), timed in fastest.items():
        if not math.isfinite(timed.train_s):
            continue
        allocation = take_accelerators(nodes, kind, workers, tensor)
        if allocation is not None and (supply := count_supply(allocation[0], largest)):
            found.append(_TrainingCandidate(timed, allocation[0], tuple(allocation[1]), supply))
    return sorted(found, key=lambda way: (way.option.train_s, way.option.layout.workers))


class _AllocationSearch:
    """Bisection over limits. Invariant: the best plan so far has the lowest limit known to be
    feasible.
    """

    def __init__(
        self, range_costs: RangeCosts, candidates: Sequence[_TrainingCandidate], max_cells: int
    ) -> None:
        self.range_costs, self.candidates, self.max_cells = range_costs, candidates, max_cells
        self._states = self._build_states(max_cells)
        self.is_exact = all(states.is_exact for states in self._states.values())

    def find_best(self, tolerance: float) -> tuple[_TrainingCandidate, list[GangSpan]] | None:
        """Find the training option and gangs of the shortest iteration, up to a relative
        `tolerance`.
        """
        found = self._find_within(MAX_SECONDS)
        if found is None:
            return None
        high = self._compute_iteration_s(found)
        low = max(self.candidates[0].option.train_s * (1 - tolerance), high * 1e-6)
        while high > low * (1 + tolerance):
            middle = math.sqrt(low * high)
            better = self._find_within(middle)
            if better is None:
                low = middle
            else:
                found, high = better, min(middle, self._compute_iteration_s(better))
        return found

    def _find_within(self, limit_s: float) -> tuple[_TrainingCandidate, list[GangSpan]] | None:
        """Find a training option and gangs within a limit; None if there are none."""
        reach = cache(lambda server: self.range_costs.find_range_ends(server, limit_s))
        tables: dict[int, FurthestTable] = {}
        for way in self.candidates:
            if way.option.train_s > limit_s:
                break
            of = self._states[frozenset(way.supply)]
            table = tables.get(id(of))
            if table is None:
                table = tables[id(of)] = FurthestTable(of, reach)
            state = of.find_state(way.supply)
            if table.find_end(state) >= self.range_costs.group_count:
                return way, table.find_spans(state)
        return None

    def _compute_iteration_s(self, allocation: tuple[_TrainingCandidate, list[GangSpan]]) -> float:
        way, spans = allocation
        return max(way.option.train_s, *(_predict_span_s(self.range_costs, span) for span in spans))

    def _build_states(self, max_cells: int) -> dict[_PoolSet, SupplyStates]:
        """Build the states of each set of pools that training options leave, with at most
        `max_cells` cells in total. Beyond the limit, options with fewer pools use the states of
        more pools.
        """
        most: dict[_PoolSet, Supply] = {}
        for way in self.candidates:
            _widen(most.setdefault(frozenset(way.supply), {}), way.supply)
        kinds = self.range_costs.kinds
        found = {key: SupplyStates(of, kinds, max_cells) for key, of in most.items()}
        if sum(states.cells for states in found.values()) <= max_cells:
            return found
        widest = {key: max((k for k in most if key <= k), key=len) for key in most}
        for key, of in list(most.items()):
            _widen(most[widest[key]], of)
        each = max_cells // len(set(widest.values()))
        found = {key: SupplyStates(most[key], kinds, each) for key in set(widest.values())}
        return {key: found[widest[key]] for key in most}


def _widen(widest: Supply, supply: Supply) -> None:
    for pool, count in supply.items():
        widest[pool] = max(widest.get(pool, 0), count)


def _predict_span_s(range_costs: RangeCosts, span: GangSpan) -> float:
    return range_costs.predict_range_s(span.server, span.first, span.end)
