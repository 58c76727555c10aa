"""What gangs that exist take, as the least time in which they serve everything: what a plan is
compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from services.planner.layouts.allocation import NO_TRAINING, TOLERANCE, allocate
from services.planner.layouts.nodes import LayoutNode
from services.planner.layouts.serving import Served


def rollout_s(
    ranges: Served, gangs: Sequence[tuple[str, int]], tolerance: float = TOLERANCE
) -> float:
    """Seconds of gangs of (kind, degree), each with the range of lengths that suits them best;
    infinite when they cannot serve every group. Gangs of which `ranges` has no server do nothing.
    """
    nodes = [
        LayoutNode(_alone(kind, degree), str(index), degree)
        for index, (kind, degree) in enumerate(gangs)
    ]
    undivided = copy(ranges)  # each server has a kind of its own: no gang is made into others
    undivided.kinds = [(_alone(kind, degree), degree) for kind, degree in ranges.kinds]
    plan = allocate(undivided, nodes, [NO_TRAINING], tolerance)
    return plan.rollout_s if plan is not None else float("inf")


def _alone(kind: str, degree: int) -> str:
    return f"{kind} x {degree}"
