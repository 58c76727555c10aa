"""The same questions answered by trying everything: for few groups and accelerators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise

from meshrl.services.planner.layouts.allocation import TrainingOption
from meshrl.services.planner.layouts.layout_nodes import LayoutNode

Cost = Callable[[int, frozenset[int]], float]  # of a server and the groups that it serves


def leftovers(
    nodes: Sequence[LayoutNode], timed: TrainingOption
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the rest of the nodes for each placement of a layout, as (kind, free accelerators)."""
    layout = timed.layout

    def generate_shares(
        index: int, units: int, left: tuple[tuple[str, int], ...]
    ) -> Iterator[tuple[tuple[str, int], ...]]:
        if index == len(nodes):
            if units == 0:
                yield left
            return
        node = nodes[index]
        most = node.free_accelerators // layout.tensor_parallel if node.kind == layout.kind else 0
        for count in range(min(most, units) + 1):
            rest = node.free_accelerators - count * layout.tensor_parallel
            yield from generate_shares(index + 1, units - count, (*left, (node.kind, rest)))

    yield from generate_shares(0, layout.workers // layout.tensor_parallel, ())


@cache
def packs(left: tuple[tuple[str, int], ...], gangs: tuple[tuple[str, int], ...]) -> bool:
    """Return True if gangs of (kind, degree) fit into nodes, each into one."""
    if not gangs:
        return True
    kind, degree = gangs[0]
    return any(
        packs(tuple(sorted((*left[:i], (of, free - degree), *left[i + 1 :]))), gangs[1:])
        for i, (of, free) in enumerate(left)
        if of == kind and free >= degree
    )


def partitions(groups: int) -> Iterator[list[frozenset[int]]]:
    """Yield every division of the groups into contiguous ranges."""
    for count in range(groups):
        for cuts in combinations(range(1, groups), count):
            edges = (0, *cuts, groups)
            yield [frozenset(range(a, b)) for a, b in pairwise(edges)]


def divisions(groups: int) -> Iterator[list[frozenset[int]]]:
    """Yield every division of the groups into arbitrary parts."""
    if groups == 0:
        yield []
        return
    for parts in divisions(groups - 1):
        for i, part in enumerate(parts):
            yield [*parts[:i], part | {groups - 1}, *parts[i + 1 :]]
        yield [*parts, frozenset({groups - 1})]


def rollout_s(
    kinds: Sequence[tuple[str, int]],
    left: tuple[tuple[str, int], ...],
    parts: Iterator[list[frozenset[int]]],
    cost: Cost,
    below: float = math.inf,
) -> float:
    """Return the shortest time in which gangs serve one of the divisions; or `below` or more."""
    best = below
    cost = cache(cost)

    def assigned(
        division: list[frozenset[int]], gangs: tuple[tuple[str, int], ...], so_far: float
    ) -> None:
        nonlocal best
        if so_far >= best or not packs(left, tuple(sorted(gangs, key=lambda g: (-g[1], g[0])))):
            return
        if not division:
            best = so_far
            return
        for server, kind in enumerate(kinds):
            took = max(so_far, cost(server, division[0]))
            assigned(division[1:], (*gangs, kind), took)

    for division in parts:
        assigned(division, (), 0.0)
    return best


def iteration_s(
    kinds: Sequence[tuple[str, int]],
    groups: int,
    nodes: Sequence[LayoutNode],
    ways: Sequence[TrainingOption],
    cost: Cost,
    parts: Callable[[int], Iterator[list[frozenset[int]]]] = partitions,
) -> float:
    """Return the shortest max(T_rollout, T_train) of the family; infinite if there is none."""
    best = math.inf
    for timed in sorted(ways, key=lambda one: one.train_s):
        if timed.train_s >= best:
            break
        for left in {tuple(sorted(left)) for left in leftovers(nodes, timed)}:
            found = rollout_s(kinds, left, parts(groups), cost, best)
            best = min(best, max(found, timed.train_s))
    return best
