"""Layout of a simulated job by the planner's search (`services/planner/layouts`): training workers,
and degrees of engines. Its history consists of the job's own future trajectories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import Accelerator
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.services.planner.costs.rollout_costs import EngineGang
from meshrl.services.planner.costs.training_costs import TrainingLayout, TrainingWork
from meshrl.services.planner.layouts.allocation import LayoutPlan, TrainingOption, allocate
from meshrl.services.planner.layouts.layout_nodes import LayoutNode
from meshrl.services.planner.layouts.length_groups import (
    LengthGroup,
    choose_group_count,
    group_by_quantiles,
)
from meshrl.services.planner.layouts.range_costs import GangServer, RangeCosts
from meshrl.sim.cluster.model.workload import SimWorkload, TrajectoryScript
from meshrl.sim.cluster.training_candidates import TrainingCandidates, TrainingCapabilities

MAX_HISTORY = 1024  # maximum trajectories of the history


@dataclass(frozen=True, slots=True)
class SimLayout:
    """Initial layout of a job."""

    training: TrainingLayout
    tensor_parallel_sizes: tuple[int, ...]  # degrees, descending


@dataclass(frozen=True, slots=True)
class LayoutQuery:
    """Inputs of a layout search."""

    name: str
    shape: ModelShape
    accelerator: Accelerator
    nodes: Sequence[LayoutNode]
    workload: SimWorkload
    groups_per_step: int  # per step,
    group_size: int  # of so many trajectories
    slots: int
    tensor_parallel_sizes: Sequence[int]  # that engines may have
    trainable: TrainingCapabilities


def search_layout(query: LayoutQuery, uniform: bool) -> SimLayout:
    """Find the layout with the shortest iteration; `uniform`: all engines have one degree. Raise
    ConfigError if none fits.
    """
    kinds = (
        [[degree] for degree in query.tensor_parallel_sizes]
        if uniform
        else [list(query.tensor_parallel_sizes)]
    )
    found = [(plan, of) for of in kinds if (plan := _search_plan(query, of)) is not None]
    if not found:
        raise ConfigError(
            f"no layout of job {query.name} fits on these hosts",
            where="plan",
            fix="Add hosts, or allow engines of more accelerators: degrees = [2, 4]",
        )
    plan, degrees = min(found, key=lambda one: one[0].iteration_s)
    return SimLayout(plan.training_option.layout, _fill_idle_workers(query.nodes, plan, degrees))


def search_training_layout(query: LayoutQuery) -> TrainingLayout:
    """Find the fastest training layout on the requested core; raise ConfigError if none fits."""
    kind, least = query.accelerator.kind, query.trainable.min_workers
    ways = _list_candidates(query, _sample_length_groups(query))
    if not ways:
        raise ConfigError(
            f"the core of job {query.name}, {least} {kind}, lacks memory for its states and a "
            "trajectory's activations",
            where="ranks",
            fix="Add ranks, or split the model: tensor, pipeline",
        )
    return min(ways, key=lambda way: way.train_s).layout


def _search_plan(query: LayoutQuery, degrees: Sequence[int]) -> LayoutPlan | None:
    groups = _sample_length_groups(query)
    workers = sum(node.free_accelerators for node in query.nodes)
    gangs = [EngineGang(query.shape, query.accelerator, degree) for degree in degrees]
    servers = [GangServer.from_gang(gang, query.slots) for gang in gangs]
    ranges = RangeCosts(servers, group_by_quantiles(groups, choose_group_count(workers)))
    return allocate(ranges, query.nodes, _list_candidates(query, groups))


def _list_candidates(query: LayoutQuery, groups: Sequence[LengthGroup]) -> Sequence[TrainingOption]:
    tokens = sum(one.generated_tokens + one.prompt_tokens for one in groups)
    squares = sum(one.requests * one.max_context_tokens**2 for one in groups)
    work = TrainingWork(sum(one.requests for one in groups), tokens, squares)
    profiles = {query.accelerator.kind: query.accelerator}
    return TrainingCandidates(query.shape, work, profiles, query.trainable).list_candidates(
        query.nodes
    )


def _sample_length_groups(query: LayoutQuery) -> list[LengthGroup]:
    """Sample the trajectories of a step from the whole run; each represents several if there are
    many.
    """
    total = query.groups_per_step * query.group_size
    each = -(-total // MAX_HISTORY)
    count = -(-total // each)
    scripts = (query.workload.draw_script(-1 - n, 0, n / max(1, count - 1)) for n in range(count))
    return [_build_length_group(script, each) for script in scripts]


def _build_length_group(script: TrajectoryScript, requests: int) -> LengthGroup:
    context, context_sum, prompts, generated = script.prompt_tokens, 0.0, script.prompt_tokens, 0.0
    for n, turn in enumerate(script.turns):
        context_sum += turn.tokens * (context + turn.tokens / 2)
        context += turn.tokens
        generated += turn.tokens
        if n + 1 < len(script.turns):
            context += turn.answer_tokens
            prompts += turn.answer_tokens
    tool_s = sum(turn.tool_s for turn in script.turns)
    return LengthGroup(
        requests,
        requests * prompts,
        requests * generated,
        requests * context_sum,
        generated,
        context,
        prompts,
        tool_s,
        requests * tool_s,
    )


def _fill_idle_workers(
    nodes: Sequence[LayoutNode], plan: LayoutPlan, degrees: Sequence[int]
) -> tuple[int, ...]:
    """Return the degrees of a plan's gangs, and of gangs of its idle workers."""
    unit = plan.training_option.layout.tensor_parallel
    used = Counter({place: unit * n for place, n in Counter(plan.training_places).items()})
    found = [gang.degree for gang in plan.gangs]
    for gang in plan.gangs:
        used[gang.place] += gang.degree
    for node in nodes:
        idle_count = node.free_accelerators - used[node.place]
        for degree in sorted(degrees, reverse=True):
            found += [degree] * (idle_count // degree)
            idle_count %= degree
    return tuple(sorted(found, reverse=True))
