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

from meshrl.common.state.pool.demand.measurements import QUANTILES, LengthQuantiles
from meshrl.services.planner.costs.training_costs import TrainingLayout
from meshrl.services.planner.layouts.allocation import (
    NO_TRAINING,
    TOLERANCE,
    LayoutPlan,
    TrainingOption,
    allocate,
)
from meshrl.services.planner.layouts.layout_nodes import LayoutNode
from meshrl.services.planner.layouts.length_groups import (
    LengthGroup,
    choose_group_count,
    group_by_quantiles,
    make_uniform_group,
)
from meshrl.services.planner.layouts.range_costs import RangeCosts

MAX_TRAJECTORIES = (
    4096  # trajectories of a step that are told apart; of more, each stands for several
)

GangKinds = tuple[tuple[str, int], ...]  # (kind of accelerators, degree) of each engine


@dataclass(frozen=True, slots=True)
class ReshapeOptions:
    """A job's workers: those that may get something else to do, and those that stay."""

    nodes: tuple[LayoutNode, ...]  # of workers that may; a place is a host's accelerators of a kind
    movable_engines: GangKinds  # on those workers now
    movable_hybrids: int  # on those workers now
    pinned_engines: GangKinds = ()  # engines that people have put there
    pinned_hybrids: int = 0  # helpers that they have
    allows_hybrids: bool = True  # whether it may have helpers
    min_degree: int = 1  # degree that its engines may have
    min_rollout_workers: int = 1  # workers that roll out at least

    @property
    def movable_workers(self) -> int:
        """Workers that may get something else to do."""
        return sum(node.free_accelerators for node in self.nodes)


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """What all of a job's workers but the core's do."""

    degrees: tuple[int, ...]  # of engines, falling
    hybrids: int
    rollout_s: float  # of a step's trajectories, by the model of layouts
    tokens_per_s: float  # of all engines, as many trajectories in each as it has room for


def group_trajectories(
    lengths: LengthQuantiles, trajectories: float, tool_s: float, workers: int
) -> Sequence[LengthGroup]:
    """A step's trajectories by length, in as many groups as the search needs for the workers."""
    count = max(1, min(MAX_TRAJECTORIES, round(trajectories)))
    each = max(1, round(trajectories / count))
    at = (np.arange(count) + 0.5) / count
    sampled = np.maximum(np.interp(at, QUANTILES, lengths.sampled), 1.0)
    found = [make_uniform_group(each, lengths.prompt, float(tokens), tool_s) for tokens in sampled]
    return group_by_quantiles(found, choose_group_count(workers))


def build_current_shape(range_costs: RangeCosts, options: ReshapeOptions) -> RolloutShape:
    """The shape that is there; its time is infinite where no server is known of an engine's."""
    return _build_shape(range_costs, options, options.movable_engines, options.movable_hybrids)


def list_candidate_shapes(
    range_costs: RangeCosts, options: ReshapeOptions, predict_train_s: Callable[[int], float]
) -> Iterator[RolloutShape]:
    """Shapes that are best by the model of layouts: with the helpers that are there, and with any
    number; what they leave idle rolls out, or helps. `train_s` is the time of a step's training
    with so many helpers, pinned ones among them.
    """
    stays = sum(degree for _, degree in options.pinned_engines)
    most = max(
        0, options.movable_workers - max(options.min_rollout_workers - stays, options.min_degree)
    )
    here = min(options.movable_hybrids, most)
    for counts in (range(here, here + 1), range(most + 1 if options.allows_hybrids else 1)):
        ways = [
            TrainingOption(
                TrainingLayout(kind, data_parallel=helpers),
                predict_train_s(options.pinned_hybrids + helpers),
            )
            for kind in sorted({node.kind for node in options.nodes})
            for helpers in counts
        ]
        plan = allocate(range_costs, options.nodes, ways)
        if plan is not None:
            for helps in (False, True) if options.allows_hybrids else (False,):
                gangs, helpers = _fill_idle_workers(options, plan, helps)
                yield _build_shape(range_costs, options, gangs, helpers)


def _fill_idle_workers(
    options: ReshapeOptions, plan: LayoutPlan, as_hybrids: bool
) -> tuple[GangKinds, int]:
    """A plan's gangs and helpers, and what those do whom it leaves idle."""
    used = Counter(plan.training_places)
    for gang in plan.gangs:
        used[gang.place] += gang.degree
    gangs, helpers = [(gang.kind, gang.degree) for gang in plan.gangs], len(plan.training_places)
    for node in options.nodes:
        left = node.free_accelerators - used[node.place]
        more = 0 if as_hybrids else left // options.min_degree
        gangs += [(node.kind, options.min_degree)] * more
        helpers += left - more * options.min_degree if options.allows_hybrids else 0
    return tuple(gangs), helpers


def _build_shape(
    range_costs: RangeCosts, options: ReshapeOptions, gangs: GangKinds, hybrids: int
) -> RolloutShape:
    there = (*options.pinned_engines, *gangs)
    degrees = tuple(sorted((degree for _, degree in there), reverse=True))
    rates = {
        (one.kind, one.degree): one.predict_tokens_per_s(range_costs.mean_context_tokens)
        for one in range_costs.servers
    }
    tokens_per_s = sum(rates.get(gang, 0.0) for gang in there)
    return RolloutShape(
        degrees,
        options.pinned_hybrids + hybrids,
        predict_rollout_s(range_costs, there),
        tokens_per_s,
    )


def predict_rollout_s(
    range_costs: RangeCosts, gangs: Sequence[tuple[str, int]], tolerance: float = TOLERANCE
) -> float:
    """Seconds of gangs of (kind, degree) that are there, each with the range of lengths that suits
    them best; infinite when they cannot serve every group. Gangs of which `ranges` has no server
    do nothing.
    """

    def alone(kind: str, degree: int) -> str:
        return f"{kind} x {degree}"

    nodes = [LayoutNode(alone(*gang), str(index), gang[1]) for index, gang in enumerate(gangs)]
    undivided = copy(range_costs)  # each server has a kind of its own: no gang is made into others
    undivided.kinds = [(alone(kind, degree), degree) for kind, degree in range_costs.kinds]
    plan = allocate(undivided, nodes, [NO_TRAINING], tolerance)
    return plan.rollout_s if plan is not None else math.inf
