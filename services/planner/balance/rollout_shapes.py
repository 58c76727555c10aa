"""Candidate shapes of a job's workers: degrees of engines and hybrids, each with its rollout time.
`reshaping.py` chooses among them.
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
    4096  # trajectories of a step modelled one by one; beyond it, each stands for several
)

GangKinds = tuple[tuple[str, int], ...]  # (kind of accelerators, degree) of each engine


@dataclass(frozen=True, slots=True)
class ReshapeOptions:
    """Workers of a job, movable and pinned."""

    nodes: tuple[LayoutNode, ...]  # movable workers; a place is a host's accelerators of one kind
    movable_engines: GangKinds  # now on movable workers
    movable_hybrids: int  # now on movable workers
    pinned_engines: GangKinds = ()  # engines pinned by a user
    pinned_hybrids: int = 0  # hybrids pinned by a user
    allows_hybrids: bool = True  # True if the job may have hybrids
    min_degree: int = 1  # smallest degree of its engines
    min_rollout_workers: int = 1  # minimum number of rollout workers

    @property
    def movable_workers(self) -> int:
        """Number of movable workers."""
        return sum(node.free_accelerators for node in self.nodes)


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """Assignment of all of a job's workers except the core's."""

    degrees: tuple[int, ...]  # of engines, descending
    hybrids: int
    rollout_s: float  # seconds of a step's rollout, by the layout model
    tokens_per_s: float  # of all engines with full batches


def group_trajectories(
    lengths: LengthQuantiles, trajectories: float, tool_s: float, workers: int
) -> Sequence[LengthGroup]:
    """Group a step's trajectories by length, in as many groups as the search needs."""
    count = max(1, min(MAX_TRAJECTORIES, round(trajectories)))
    each = max(1, round(trajectories / count))
    at = (np.arange(count) + 0.5) / count
    sampled = np.maximum(np.interp(at, QUANTILES, lengths.sampled_tokens), 1.0)
    found = [
        make_uniform_group(each, lengths.mean_prompt_tokens, float(tokens), tool_s)
        for tokens in sampled
    ]
    return group_by_quantiles(found, choose_group_count(workers))


def build_current_shape(range_costs: RangeCosts, options: ReshapeOptions) -> RolloutShape:
    """Build the current shape. Its time is infinite if no server is known for an engine."""
    return _build_shape(range_costs, options, options.movable_engines, options.movable_hybrids)


def list_candidate_shapes(
    range_costs: RangeCosts, options: ReshapeOptions, predict_train_s: Callable[[int], float]
) -> Iterator[RolloutShape]:
    """Yield the shapes that are best by the layout model: with the present number of hybrids, and
    with any number. Idle workers become engines or hybrids. `predict_train_s` predicts a step's
    training seconds for a number of hybrids, pinned ones included.
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
    """Return the gangs and hybrids of a plan, with idle workers assigned."""
    used = Counter(plan.training_places)
    for gang in plan.gangs:
        used[gang.place] += gang.degree
    gangs, helpers = [(gang.kind, gang.degree) for gang in plan.gangs], len(plan.training_places)
    for node in options.nodes:
        idle_workers = node.free_accelerators - used[node.place]
        more = 0 if as_hybrids else idle_workers // options.min_degree
        gangs += [(node.kind, options.min_degree)] * more
        helpers += idle_workers - more * options.min_degree if options.allows_hybrids else 0
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
    """Predict the rollout seconds of present gangs of (kind, degree), each with its best range of
    lengths. Return infinity if they cannot serve every group. Gangs without a server in
    `range_costs` are ignored.
    """

    def alone(kind: str, degree: int) -> str:
        return f"{kind} x {degree}"

    nodes = [LayoutNode(alone(*gang), str(index), gang[1]) for index, gang in enumerate(gangs)]
    undivided = copy(range_costs)  # each server has its own kind: no gang is converted
    undivided.kinds = [(alone(kind, degree), degree) for kind, degree in range_costs.kinds]
    plan = allocate(undivided, nodes, [NO_TRAINING], tolerance)
    return plan.rollout_s if plan is not None else math.inf
