"""The layout that the planner's search gives a job (`services/planner/layouts`): how many train,
and the degrees of its engines. Its history is what the job's own trajectories will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.profiles import Accelerator
from meshrl.common.hardware.shapes import ModelShape
from meshrl.services.planner.costs.rollout import EngineGang
from meshrl.services.planner.costs.training import TrainingLayout, TrainingWork
from meshrl.services.planner.layouts.allocation import LayoutPlan, Timed, allocate
from meshrl.services.planner.layouts.grouping import LengthGroup, groups_for, quantiles
from meshrl.services.planner.layouts.nodes import LayoutNode
from meshrl.services.planner.layouts.serving import GangServer, Served
from meshrl.sim.cluster.model.workload import Script, SimWorkload
from meshrl.sim.cluster.ways import Trainable, TrainingWays

MANY = 1024  # trajectories of the history at most


@dataclass(frozen=True, slots=True)
class SimLayout:
    """Who does what at the beginning."""

    training: TrainingLayout
    engines: tuple[int, ...]  # degrees, falling


@dataclass(frozen=True, slots=True)
class LayoutQuery:
    """What a job's layout is searched for."""

    name: str
    shape: ModelShape
    on: Accelerator
    nodes: Sequence[LayoutNode]
    workload: SimWorkload
    groups: int  # of a step,
    size: int  # of so many trajectories
    slots: int
    degrees: Sequence[int]  # that engines may have
    trainable: Trainable


def planned(asked: LayoutQuery, uniform: bool) -> SimLayout:
    """The layout with the shortest iteration; `uniform`: all engines have one degree. ConfigError
    where nothing fits.
    """
    kinds = [[degree] for degree in asked.degrees] if uniform else [list(asked.degrees)]
    found = [(plan, of) for of in kinds if (plan := _plan(asked, of)) is not None]
    if not found:
        raise ConfigError(
            f"no layout of job {asked.name} fits on these hosts",
            where="plan",
            fix="Add hosts, or let engines have more accelerators: degrees = [2, 4]",
        )
    plan, degrees = min(found, key=lambda one: one[0].iteration_s)
    return SimLayout(plan.training.layout, _filled(asked.nodes, plan, degrees))


def layout(asked: LayoutQuery) -> TrainingLayout:
    """The fastest way to train on the core that is asked for; ConfigError where it does not fit."""
    kind, least = asked.on.kind, asked.trainable.least
    ways = _ways(asked, _groups(asked))
    if not ways:
        raise ConfigError(
            f"the core of job {asked.name}, {least} {kind}, has no room for its states and a "
            "trajectory's activations",
            where="ranks",
            fix="Give it more ranks, or split it: tensor, pipeline",
        )
    return min(ways, key=lambda way: way.seconds).layout


def _plan(asked: LayoutQuery, degrees: Sequence[int]) -> LayoutPlan | None:
    groups = _groups(asked)
    workers = sum(node.free for node in asked.nodes)
    gangs = [EngineGang(asked.shape, asked.on, degree) for degree in degrees]
    servers = [GangServer.of(gang, asked.slots) for gang in gangs]
    ranges = Served(servers, quantiles(groups, groups_for(workers)))
    return allocate(ranges, asked.nodes, _ways(asked, groups))


def _ways(asked: LayoutQuery, groups: Sequence[LengthGroup]) -> Sequence[Timed]:
    tokens = sum(one.generated + one.prompts for one in groups)
    squares = sum(one.requests * one.longest_context**2 for one in groups)
    work = TrainingWork(sum(one.requests for one in groups), tokens, squares)
    profiles = {asked.on.kind: asked.on}
    return TrainingWays(asked.shape, work, profiles, asked.trainable).ways(asked.nodes)


def _groups(asked: LayoutQuery) -> list[LengthGroup]:
    """The trajectories of a step, as from all along the run; each stands for several where they are
    many.
    """
    total = asked.groups * asked.size
    each = -(-total // MANY)
    count = -(-total // each)
    scripts = (asked.workload.script(-1 - n, 0, n / max(1, count - 1)) for n in range(count))
    return [_group(script, each) for script in scripts]


def _group(script: Script, requests: int) -> LengthGroup:
    context, held, prompts, generated = script.prompt, 0.0, script.prompt, 0.0
    for n, turn in enumerate(script.turns):
        held += turn.tokens * (context + turn.tokens / 2)
        context += turn.tokens
        generated += turn.tokens
        if n + 1 < len(script.turns):
            context += turn.answer
            prompts += turn.answer
    tool_s = sum(turn.tool_s for turn in script.turns)
    return LengthGroup(
        requests,
        requests * prompts,
        requests * generated,
        requests * held,
        generated,
        context,
        prompts,
        tool_s,
        requests * tool_s,
    )


def _filled(
    nodes: Sequence[LayoutNode], plan: LayoutPlan, degrees: Sequence[int]
) -> tuple[int, ...]:
    """The degrees of a plan's gangs, and of those that workers form whom it leaves idle."""
    unit = plan.training.layout.tensor
    used = Counter({place: unit * n for place, n in Counter(plan.trains_at).items()})
    found = [gang.degree for gang in plan.gangs]
    for gang in plan.gangs:
        used[gang.place] += gang.degree
    for node in nodes:
        left = node.free - used[node.place]
        for degree in sorted(degrees, reverse=True):
            found += [degree] * (left // degree)
            left %= degree
    return tuple(sorted(found, reverse=True))
