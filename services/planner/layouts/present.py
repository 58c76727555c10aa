"""What gangs that exist take, as the least time in which they serve everything: what a plan is
compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.layouts.allocation import NO_TRAINING, TOLERANCE, allocate
from services.planner.layouts.nodes import LayoutNode
from services.planner.layouts.serving import Positions, Ranges


def rollout_s(
    ranges: Ranges, gangs: Sequence[tuple[str, int]], tolerance: float = TOLERANCE
) -> float:
    """Seconds of gangs of (kind, degree), each with the range of lengths that suits them best;
    infinite when they cannot serve every group. Gangs of which `ranges` has no server do nothing.
    """
    nodes = [
        LayoutNode(_alone(kind, degree), str(index), degree)
        for index, (kind, degree) in enumerate(gangs)
    ]
    plan = allocate(_Undivided(ranges), nodes, [NO_TRAINING], tolerance)
    return plan.rollout_s if plan is not None else float("inf")


@dataclass(frozen=True, slots=True)
class _Undivided:
    """Ranges whose servers are of a kind each, so that no gang is made into others."""

    ranges: Ranges

    @property
    def kinds(self) -> Sequence[tuple[str, int]]:
        return [(_alone(kind, degree), degree) for kind, degree in self.ranges.kinds]

    @property
    def groups(self) -> int:
        return self.ranges.groups

    def seconds(self, server: int, first: int, end: int) -> float:
        return self.ranges.seconds(server, first, end)

    def reach(self, server: int, limit_s: float) -> Positions:
        return self.ranges.reach(server, limit_s)


def _alone(kind: str, degree: int) -> str:
    return f"{kind} x {degree}"
