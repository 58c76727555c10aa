"""The shapes that a job's workers could be given, degrees of engines and helpers, each with what
its rollout takes by lengths of trajectories: what `reshaping.py` chooses of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from meshrl.common.state.pool.demand.measured import LEVELS, Lengths
from meshrl.services.planner.costs.training import TrainingLayout
from meshrl.services.planner.layouts.allocation import (
    NO_TRAINING,
    TOLERANCE,
    LayoutPlan,
    Timed,
    allocate,
)
from meshrl.services.planner.layouts.grouping import LengthGroup, alike, groups_for, quantiles
from meshrl.services.planner.layouts.nodes import LayoutNode
from meshrl.services.planner.layouts.serving import Served

MOST = 4096  # trajectories of a step that are told apart; of more, each stands for several

Gangs = tuple[tuple[str, int], ...]  # (kind of accelerators, degree) of each engine


@dataclass(frozen=True, slots=True)
class ShapeRoom:
    """A job's workers: those that may get something else to do, and those that stay."""

    nodes: tuple[LayoutNode, ...]  # of workers that may; a place is a host's accelerators of a kind
    engines: Gangs  # on those workers now
    helpers: int  # on those workers now
    stays: Gangs = ()  # engines that people have put there
    helping: int = 0  # helpers that they have
    helped: bool = True  # whether it may have helpers
    smallest: int = 1  # degree that its engines may have
    least: int = 1  # workers that roll out at least

    @property
    def free(self) -> int:
        """Workers that may get something else to do."""
        return sum(node.free for node in self.nodes)


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """What all of a job's workers but the core's do."""

    degrees: tuple[int, ...]  # of engines, falling
    helpers: int
    rollout_s: float  # of a step's trajectories, by the model of layouts
    tokens_per_s: float  # of all engines, as many trajectories in each as it has room for


def groups_of(
    lengths: Lengths, trajectories: float, tool_s: float, workers: int
) -> Sequence[LengthGroup]:
    """A step's trajectories by length, in as many groups as the search needs for the workers."""
    count = max(1, min(MOST, round(trajectories)))
    each = max(1, round(trajectories / count))
    at = (np.arange(count) + 0.5) / count
    sampled = np.maximum(np.interp(at, LEVELS, lengths.sampled), 1.0)
    found = [alike(each, lengths.prompt, float(tokens), tool_s) for tokens in sampled]
    return quantiles(found, groups_for(workers))


def present(ranges: Served, room: ShapeRoom) -> RolloutShape:
    """The shape that is there; its time is infinite where no server is known of an engine's."""
    return _shape(ranges, room, room.engines, room.helpers)


def others(
    ranges: Served, room: ShapeRoom, train_s: Callable[[int], float]
) -> Iterator[RolloutShape]:
    """Shapes that are best by the model of layouts: with the helpers that are there, and with any
    number; what they leave idle rolls out, or helps. `train_s` is the time of a step's training
    with so many helpers, pinned ones among them.
    """
    stays = sum(degree for _, degree in room.stays)
    most = max(0, room.free - max(room.least - stays, room.smallest))
    here = min(room.helpers, most)
    for counts in (range(here, here + 1), range(most + 1 if room.helped else 1)):
        ways = [
            Timed(TrainingLayout(kind, data=helpers), train_s(room.helping + helpers))
            for kind in sorted({node.kind for node in room.nodes})
            for helpers in counts
        ]
        plan = allocate(ranges, room.nodes, ways)
        if plan is not None:
            for helps in (False, True) if room.helped else (False,):
                gangs, helpers = _filled(room, plan, helps)
                yield _shape(ranges, room, gangs, helpers)


def _filled(room: ShapeRoom, plan: LayoutPlan, helps: bool) -> tuple[Gangs, int]:
    """A plan's gangs and helpers, and what those do whom it leaves idle."""
    used = Counter(plan.trains_at)
    for gang in plan.gangs:
        used[gang.place] += gang.degree
    gangs, helpers = [(gang.kind, gang.degree) for gang in plan.gangs], len(plan.trains_at)
    for node in room.nodes:
        left = node.free - used[node.place]
        more = 0 if helps else left // room.smallest
        gangs += [(node.kind, room.smallest)] * more
        helpers += left - more * room.smallest if room.helped else 0
    return tuple(gangs), helpers


def _shape(ranges: Served, room: ShapeRoom, gangs: Gangs, helpers: int) -> RolloutShape:
    there = (*room.stays, *gangs)
    degrees = tuple(sorted((degree for _, degree in there), reverse=True))
    rates = {(one.kind, one.degree): one.tokens_per_s(ranges.context) for one in ranges.servers}
    tokens_per_s = sum(rates.get(gang, 0.0) for gang in there)
    return RolloutShape(degrees, room.helping + helpers, rollout_s(ranges, there), tokens_per_s)


def rollout_s(
    ranges: Served, gangs: Sequence[tuple[str, int]], tolerance: float = TOLERANCE
) -> float:
    """Seconds of gangs of (kind, degree) that are there, each with the range of lengths that suits
    them best; infinite when they cannot serve every group. Gangs of which `ranges` has no server
    do nothing.
    """

    def alone(kind: str, degree: int) -> str:
        return f"{kind} x {degree}"

    nodes = [LayoutNode(alone(*gang), str(index), gang[1]) for index, gang in enumerate(gangs)]
    undivided = copy(ranges)  # each server has a kind of its own: no gang is made into others
    undivided.kinds = [(alone(kind, degree), degree) for kind, degree in ranges.kinds]
    plan = allocate(undivided, nodes, [NO_TRAINING], tolerance)
    return plan.rollout_s if plan is not None else math.inf
