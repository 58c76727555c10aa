"""Plans against trying everything."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.layouts.brute import iteration_s
from loadtests.layouts.cases import QWEN_14B, lengths, servers, small
from meshrl.common.hardware.profiles import declared
from meshrl.common.hardware.shapes import ModelShape
from meshrl.services.planner.costs.training import TrainingLayout, TrainingWork
from meshrl.services.planner.layouts.allocation import (
    NO_TRAINING,
    TOLERANCE,
    LayoutPlan,
    Timed,
    allocate,
)
from meshrl.services.planner.layouts.grouping import alike
from meshrl.services.planner.layouts.nodes import LayoutNode
from meshrl.services.planner.layouts.serving import Served
from meshrl.sim.cluster.ways import Trainable, TrainingWays


@pytest.mark.rotating(2)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_a_plan_is_as_short_as_the_shortest_of_all(seed: int) -> None:
    case = small(seed)
    plan = allocate(case.ranges, case.nodes, case.ways, tolerance=1e-9)
    ranges = case.ranges
    shortest = iteration_s(
        ranges.kinds,
        ranges.groups,
        case.nodes,
        case.ways,
        case.cost,
    )
    assert plan is None if math.isinf(shortest) else plan is not None
    if plan is not None:
        assert plan.exact
        assert plan.iteration_s == pytest.approx(shortest, rel=1e-9)


def checked(plan: LayoutPlan, ranges: Served, nodes: Sequence[LayoutNode]) -> None:
    """What every plan promises: all groups once and in order, in gangs that lie in nodes."""
    ends = [0, *(gang.end for gang in plan.gangs)]
    assert [gang.first for gang in plan.gangs] == ends[:-1]
    assert ends[-1] == ranges.groups
    used: Counter[str] = Counter()
    for place in plan.trains_at:
        used[place] += plan.training.layout.tensor
    kinds = {node.place: node.kind for node in nodes}
    for gang in plan.gangs:
        used[gang.place] += gang.degree
        assert kinds[gang.place] == gang.kind
        server = list(ranges.kinds).index((gang.kind, gang.degree))
        assert gang.seconds == ranges.seconds(server, gang.first, gang.end)
    assert all(used[node.place] <= node.free for node in nodes)


@pytest.mark.rotating(2)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_a_plan_serves_every_group_with_the_accelerators_there_are(seed: int) -> None:
    case = small(seed, groups=30, most=40)
    plan = allocate(case.ranges, case.nodes, case.ways)
    if plan is not None:
        checked(plan, case.ranges, case.nodes)
        assert plan.iteration_s == max(plan.train_s, *(gang.seconds for gang in plan.gangs))


@pytest.mark.deep
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_a_coarse_search_finds_a_plan_that_is_no_shorter(seed: int) -> None:
    case = small(seed, groups=30, most=40)
    exact = allocate(case.ranges, case.nodes, case.ways)
    coarse = allocate(case.ranges, case.nodes, case.ways, limit=200)
    if coarse is not None:
        assert exact is not None
        checked(coarse, case.ranges, case.nodes)
        assert coarse.iteration_s >= exact.iteration_s * (1 - 2 * TOLERANCE)


def test_large_clusters_are_planned_exactly_where_their_nodes_are_whole() -> None:
    rng = random.Random(3)
    nodes = [LayoutNode(kind, f"{kind}{n}", 8) for kind in ("A800", "H100") for n in range(8)]
    groups = lengths(rng, 1024, 3000, 0.3)
    ranges = Served(servers(QWEN_14B, ("A800", "H100")), groups)
    work = TrainingWork(1024, sum(g.generated for g in groups), sum(g.held for g in groups))
    ways = TrainingWays(QWEN_14B, work, declared(), Trainable(grain=8)).ways(nodes)
    plan, coarse = allocate(ranges, nodes, ways), allocate(ranges, nodes, ways, limit=500)
    assert plan is not None
    assert coarse is not None
    assert plan.exact
    assert not coarse.exact
    checked(plan, ranges, nodes)
    assert plan.iteration_s <= coarse.iteration_s <= 1.2 * plan.iteration_s


def test_long_trajectories_go_to_gangs_of_more_ranks() -> None:
    groups = [alike(200, 200, 200), alike(4, 1000, 30_000)]
    nodes = [LayoutNode("A800", "host", 8), LayoutNode("A800", "other", 2)]
    plan = allocate(Served(servers(QWEN_14B, ("A800",)), groups), nodes, [NO_TRAINING])
    assert plan is not None
    assert plan.gangs[-1].degree == 8
    assert plan.gangs[-1].place == "host"
    assert all(gang.degree <= 2 for gang in plan.gangs[:-1])


def test_a_model_that_no_gang_of_the_nodes_holds_has_no_plan() -> None:
    large = ModelShape(80, 8192, 64, 8, 128, 70e9, 70e9)
    ranges = Served(servers(large, ("A800",)), [alike(8, 100, 1000)])
    nodes = [LayoutNode("A800", f"host{n}", 1) for n in range(8)]
    assert allocate(ranges, nodes, [NO_TRAINING]) is None
    pair = allocate(ranges, [LayoutNode("A800", "host", 2)], [NO_TRAINING])
    assert pair is not None
    assert [gang.degree for gang in pair.gangs] == [2]


def test_training_never_takes_what_the_last_engine_needs() -> None:
    ranges = Served(servers(QWEN_14B, ("A800",)), [alike(8, 100, 1000)])
    ways = [Timed(TrainingLayout("A800", n), 100.0 / n) for n in range(1, 9)]
    plan = allocate(ranges, [LayoutNode("A800", "host", 8)], ways)
    assert plan is not None
    assert plan.training.layout.workers < 8
    assert allocate(ranges, [LayoutNode("A800", "host", 1)], ways) is None
