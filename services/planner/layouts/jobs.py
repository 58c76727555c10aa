"""The plans of several jobs, each within its share of the accelerators (`policies/sharing.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.planner.layouts.allocation import TOLERANCE, Plan, Timed, allocate
from services.planner.layouts.nodes import BLOCK, Node, without
from services.planner.layouts.serving import Ranges


@dataclass(frozen=True, slots=True)
class Asks:
    """What a job's plan is made of: its ranges, and the ways to train on given nodes."""

    ranges: Ranges
    ways: Callable[[Sequence[Node]], Sequence[Timed]]


def allocate_all(
    asks: Mapping[str, Asks],
    nodes: Sequence[Node],
    shares: Mapping[str, int],
    tolerance: float = TOLERANCE,
) -> dict[str, Plan | None]:
    """The plan of each job within its share, as `allocate` makes it."""
    dealt = deal(nodes, {job: shares[job] for job in asks})
    return {
        job: allocate(asked.ranges, dealt[job], asked.ways(dealt[job]), tolerance)
        for job, asked in asks.items()
    }


def deal(nodes: Sequence[Node], shares: Mapping[str, int]) -> dict[str, list[Node]]:
    """The accelerators of each job: so many, of every kind in proportion to what is there, in parts
    of nodes that are as large as can be. ValueError when shares are more than there are.
    """
    left, found = list(nodes), {}
    for job, share in shares.items():
        total = Counter({node.kind: 0 for node in left})
        for node in left:
            total[node.kind] += node.free
        if share > total.total():
            raise ValueError(f"{job} has a share of {share}, and {total.total()} are left")
        mine: Counter[tuple[str, str]] = Counter()
        for kind, count in _quotas(total, share).items():
            left = _taken(left, kind, count, mine)
        found[job] = [Node(kind, place, count) for (kind, place), count in mine.items()]
    return found


def _quotas(total: Mapping[str, int], share: int) -> dict[str, int]:
    """How many of each kind, by largest remainders."""
    exact = {kind: share * count / max(1, sum(total.values())) for kind, count in total.items()}
    found = {kind: int(part) for kind, part in exact.items()}
    order = sorted(exact, key=lambda kind: found[kind] - exact[kind])  # largest remainder first
    for kind in order[: share - sum(found.values())]:
        found[kind] += 1
    return found


def _taken(nodes: list[Node], kind: str, count: int, mine: Counter[tuple[str, str]]) -> list[Node]:
    """The nodes without so many accelerators of a kind, which are counted as `mine`."""
    unit = BLOCK
    while count:
        units = sum(node.free // unit for node in nodes if node.kind == kind)
        now = min(count // unit, units) * unit
        taken = without(nodes, kind, now, unit) if now else None
        if taken is not None:
            nodes, count = list(taken[0]), count - now
            mine.update(Counter({(kind, p): n * unit for p, n in Counter(taken[1]).items()}))
        unit = max(1, unit // 2)
    return nodes
