"""Choice of what leaves an accelerator at the least cost; pure.

A knapsack cover: the freed bytes must reach a need, the copies must fit into memory and disk, and
the sum of the costs is least. Branch and bound with the fractional relaxation as lower bound
(Martello and Toth, Knapsack Problems, 1990) finds it for the few kinds of one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
# Visited nodes after which the best choice so far is returned; about 20 ms of Python.
MAX_NODES = 5000


@dataclass(frozen=True, slots=True)
class Eviction(Generic[T]):
    """Way in which an item can leave the accelerator."""

    item: T
    action: str  # offload | drop
    tier: str  # of the copy; empty: there is none
    freed_bytes: int
    cost_s: float
    memory_bytes: int = 0  # that a new copy takes there
    disk_bytes: int = 0


def choose_evictions(
    items: Sequence[Sequence[Eviction[T]]], needed_bytes: int, memory: float, disk: float
) -> list[Eviction[T]] | None:
    """Return the cheapest evictions that free `needed_bytes`; None if there are none.

    Args:
        items: The options of each item; at most one of them is chosen.
        needed_bytes: Sum of freed bytes to reach.
        memory: Bytes that new copies may take there.
        disk: Bytes that new copies may take there.
    """
    if needed_bytes <= 0:
        return []
    search = _Search(items)
    search.visit(0, needed_bytes, memory, disk, 0.0, [])
    return None if search.best is None else _remove_needless(search.best, needed_bytes)


class _Search(Generic[T]):
    """Depth-first search over the items, those with the least cost per freed byte first."""

    def __init__(self, items: Sequence[Sequence[Eviction[T]]]) -> None:
        sortable = [
            (min(option.cost_s for option in options) / max(1, options[0].freed_bytes), options)
            for options in items
            if options
        ]
        sortable.sort(key=lambda pair: pair[0])
        self._rates = [rate for rate, _ in sortable]
        self._items = [sorted(options, key=lambda one: one.cost_s) for _, options in sortable]
        self.best: list[Eviction[T]] | None = None
        self._best_cost = float("inf")
        self._nodes = 0

    def visit(
        self,
        index: int,
        lacking: int,
        memory: float,
        disk: float,
        cost: float,
        chosen: list[Eviction[T]],
    ) -> None:
        """Visit all choices for the items from `index` on that can be better than the best."""
        self._nodes += 1
        if lacking <= 0:
            if cost < self._best_cost:
                self.best, self._best_cost = list(chosen), cost
            return
        is_worse = cost + self._bound(index, lacking) >= self._best_cost
        if is_worse or self._nodes > MAX_NODES:
            return
        for option in self._items[index]:
            if option.memory_bytes <= max(0.0, memory) and option.disk_bytes <= max(0.0, disk):
                chosen.append(option)
                self.visit(
                    index + 1,
                    lacking - option.freed_bytes,
                    memory - option.memory_bytes,
                    disk - option.disk_bytes,
                    cost + option.cost_s,
                    chosen,
                )
                chosen.pop()
        self.visit(index + 1, lacking, memory, disk, cost, chosen)

    def _bound(self, index: int, lacking: int) -> float:
        """Return the cost of the cheapest fractional cover; infinity if nothing covers it."""
        cost = 0.0
        for rate, options in zip(self._rates[index:], self._items[index:], strict=True):
            freed = options[0].freed_bytes
            if freed >= lacking:
                return cost + rate * lacking
            cost += rate * freed
            lacking -= freed
        return float("inf")


def _remove_needless(chosen: list[Eviction[T]], needed_bytes: int) -> list[Eviction[T]]:
    """Remove what is not needed: items without a cost do not make a choice dearer."""
    spare = sum(one.freed_bytes for one in chosen) - needed_bytes
    kept = []
    for one in sorted(chosen, key=lambda one: (-one.cost_s, -one.freed_bytes)):
        if one.freed_bytes <= spare:
            spare -= one.freed_bytes
        else:
            kept.append(one)
    return kept
