"""Layout plans compared with exhaustive search."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.layouts import brute
from loadtests.layouts.brute import iteration_s
from loadtests.layouts.cases import DEGREES, QWEN_14B, lengths, servers, serves_s, small
from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.services.planner.balance.rollout_shapes import predict_rollout_s
from meshrl.services.planner.costs.rollout_costs import EngineGang
from meshrl.services.planner.costs.training_costs import TrainingLayout, TrainingWork
from meshrl.services.planner.layouts.allocation import (
    NO_TRAINING,
    TOLERANCE,
    LayoutPlan,
    TrainingOption,
    allocate,
)
from meshrl.services.planner.layouts.layout_nodes import (
    LayoutNode,
    count_supply,
    place_gangs,
    take_accelerators,
)
from meshrl.services.planner.layouts.length_groups import (
    choose_group_count,
    group_by_quantiles,
    make_uniform_group,
    merge_groups,
)
from meshrl.services.planner.layouts.range_costs import GangServer, RangeCosts
from meshrl.sim.cluster.training_candidates import TrainingCandidates, TrainingCapabilities


@pytest.mark.rotating(2)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_plan_is_optimal(seed: int) -> None:
    case = small(seed)
    plan = allocate(case.ranges, case.nodes, case.ways, tolerance=1e-9)
    ranges = case.ranges
    shortest = iteration_s(
        ranges.kinds,
        ranges.group_count,
        case.nodes,
        case.ways,
        case.cost,
    )
    assert plan is None if math.isinf(shortest) else plan is not None
    if plan is not None:
        assert plan.is_exact
        assert plan.iteration_s == pytest.approx(shortest, rel=1e-9)


def assert_valid(plan: LayoutPlan, ranges: RangeCosts, nodes: Sequence[LayoutNode]) -> None:
    """Assert what every plan guarantees: all groups once and in order, in gangs within nodes."""
    ends = [0, *(gang.end for gang in plan.gangs)]
    assert [gang.first for gang in plan.gangs] == ends[:-1]
    assert ends[-1] == ranges.group_count
    used: Counter[str] = Counter()
    for place in plan.training_places:
        used[place] += plan.training_option.layout.tensor_parallel
    kinds = {node.place: node.kind for node in nodes}
    for gang in plan.gangs:
        used[gang.place] += gang.degree
        assert kinds[gang.place] == gang.kind
        server = list(ranges.kinds).index((gang.kind, gang.degree))
        assert gang.rollout_s == ranges.predict_range_s(server, gang.first, gang.end)
    assert all(used[node.place] <= node.free_accelerators for node in nodes)


@pytest.mark.rotating(2)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_plan_serves_every_group_with_the_available_accelerators(seed: int) -> None:
    case = small(seed, groups=30, most=40)
    plan = allocate(case.ranges, case.nodes, case.ways)
    if plan is not None:
        assert_valid(plan, case.ranges, case.nodes)
        assert plan.iteration_s == max(plan.train_s, *(gang.rollout_s for gang in plan.gangs))


@pytest.mark.deep
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_coarse_search_is_a_valid_upper_bound(seed: int) -> None:
    case = small(seed, groups=30, most=40)
    exact = allocate(case.ranges, case.nodes, case.ways)
    coarse = allocate(case.ranges, case.nodes, case.ways, max_cells=200)
    if coarse is not None:
        assert exact is not None
        assert_valid(coarse, case.ranges, case.nodes)
        assert coarse.iteration_s >= exact.iteration_s * (1 - 2 * TOLERANCE)


def test_large_clusters_of_whole_nodes_are_planned_exactly() -> None:
    rng = random.Random(3)
    nodes = [LayoutNode(kind, f"{kind}{n}", 8) for kind in ("A800", "H100") for n in range(8)]
    groups = lengths(rng, 1024, 3000, 0.3)
    ranges = RangeCosts(servers(QWEN_14B, ("A800", "H100")), groups)
    work = TrainingWork(
        1024, sum(g.generated_tokens for g in groups), sum(g.context_token_steps for g in groups)
    )
    ways = TrainingCandidates(
        QWEN_14B, work, load_accelerators(), TrainingCapabilities(worker_multiple=8)
    ).list_candidates(nodes)
    plan, coarse = allocate(ranges, nodes, ways), allocate(ranges, nodes, ways, max_cells=500)
    assert plan is not None
    assert coarse is not None
    assert plan.is_exact
    assert not coarse.is_exact
    assert_valid(plan, ranges, nodes)
    assert plan.iteration_s <= coarse.iteration_s <= 1.2 * plan.iteration_s


def test_long_trajectories_go_to_larger_gangs() -> None:
    groups = [make_uniform_group(200, 200, 200), make_uniform_group(4, 1000, 30_000)]
    nodes = [LayoutNode("A800", "host", 8), LayoutNode("A800", "other", 2)]
    plan = allocate(RangeCosts(servers(QWEN_14B, ("A800",)), groups), nodes, [NO_TRAINING])
    assert plan is not None
    assert plan.gangs[-1].degree == 8
    assert plan.gangs[-1].place == "host"
    assert all(gang.degree <= 2 for gang in plan.gangs[:-1])


def test_model_that_fits_no_gang_has_no_plan() -> None:
    large = ModelShape(80, 8192, 64, 8, 128, 70e9, 70e9)
    ranges = RangeCosts(servers(large, ("A800",)), [make_uniform_group(8, 100, 1000)])
    nodes = [LayoutNode("A800", f"host{n}", 1) for n in range(8)]
    assert allocate(ranges, nodes, [NO_TRAINING]) is None
    pair = allocate(ranges, [LayoutNode("A800", "host", 2)], [NO_TRAINING])
    assert pair is not None
    assert [gang.degree for gang in pair.gangs] == [2]


def test_training_leaves_the_accelerators_of_the_last_engine() -> None:
    ranges = RangeCosts(servers(QWEN_14B, ("A800",)), [make_uniform_group(8, 100, 1000)])
    ways = [TrainingOption(TrainingLayout("A800", n), 100.0 / n) for n in range(1, 9)]
    plan = allocate(ranges, [LayoutNode("A800", "host", 8)], ways)
    assert plan is not None
    assert plan.training_option.layout.workers < 8
    assert allocate(ranges, [LayoutNode("A800", "host", 1)], ways) is None


frees = st.lists(st.integers(1, 8), min_size=1, max_size=3)
degrees = st.lists(st.sampled_from((1, 2, 4, 8)), max_size=6)


def make_nodes(free: list[int]) -> list[LayoutNode]:
    return [LayoutNode("A", f"host{index}", count) for index, count in enumerate(free)]


def test_node_is_split_into_powers_of_two() -> None:
    nodes = [*make_nodes([7, 12]), LayoutNode("B", "other", 5)]
    assert count_supply(nodes, {"A": 8, "B": 2}) == {
        ("A", 4): 8, ("A", 2): 2, ("A", 1): 1, ("A", 8): 8, ("B", 2): 4, ("B", 1): 1
    }  # fmt: skip
    assert count_supply(nodes, {"B": 8}) == {("B", 4): 4, ("B", 1): 1}


@given(frees, degrees)
def test_gangs_are_placed_exactly_where_they_fit(free: list[int], gangs: list[int]) -> None:
    nodes, wanted = make_nodes(free), [("A", degree) for degree in gangs]
    fits = brute.packs(
        tuple(sorted(("A", count) for count in free)),
        tuple(sorted(wanted, key=lambda gang: -gang[1])),
    )
    if not fits:
        with pytest.raises(ValueError, match="no node has"):
            place_gangs(nodes, wanted)
        return
    used: Counter[str] = Counter()
    for (_, degree), place in zip(wanted, place_gangs(nodes, wanted), strict=True):
        used[place] += degree
    assert all(used[node.place] <= node.free_accelerators for node in nodes)


@given(frees, st.integers(0, 12), st.sampled_from((1, 2, 4)), degrees)
def test_placement_leaves_maximal_free_space(
    free: list[int], units: int, unit: int, gangs: list[int]
) -> None:
    nodes = make_nodes(free)
    choices: set[tuple[int, ...]] = {tuple(free)}
    for _ in range(units):
        choices = {
            tuple(sorted((*remaining[:i], remaining[i] - unit, *remaining[i + 1 :])))
            for remaining in choices
            for i in range(len(remaining))
            if remaining[i] >= unit
        }
    taken = take_accelerators(nodes, "A", units * unit, unit)
    assert (taken is None) == (not choices)
    if taken is None:
        return
    remaining, places = taken
    assert len(places) == units
    wanted = tuple(sorted((("A", degree) for degree in gangs), key=lambda gang: -gang[1]))
    ours = brute.packs(
        tuple(sorted((node.kind, node.free_accelerators) for node in remaining)), wanted
    )
    any_choice = any(
        brute.packs(tuple(sorted(("A", count) for count in choice)), wanted) for choice in choices
    )
    assert ours == any_choice


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_division_of_lengths_among_gangs_is_optimal(seed: int) -> None:
    case, rng = small(seed), random.Random(seed)
    ranges = case.ranges
    gangs = [rng.choice(ranges.kinds) for _ in range(rng.randint(1, 4))]
    whole = [(f"{kind} x {degree}", degree) for kind, degree in ranges.kinds]
    remaining = tuple(sorted((f"{kind} x {degree}", degree) for kind, degree in gangs))
    tried = brute.rollout_s(whole, remaining, brute.partitions(ranges.group_count), case.cost)
    assert predict_rollout_s(ranges, gangs, 1e-9) == pytest.approx(tried, rel=2e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_gang_times_match_the_plan(seed: int) -> None:
    case = small(seed)
    plan = allocate(case.ranges, case.nodes, [NO_TRAINING], 1e-9)
    if plan is not None:
        gangs = [(gang.kind, gang.degree) for gang in plan.gangs]
        assert predict_rollout_s(case.ranges, gangs, 1e-9) == pytest.approx(
            plan.rollout_s, rel=2e-9
        )


def test_missing_gangs_and_gangs_without_a_server_have_no_division() -> None:
    ranges = RangeCosts(servers(QWEN_14B, ("A800",)), [make_uniform_group(8, 100, 1000)])
    assert predict_rollout_s(ranges, []) == float("inf")
    assert predict_rollout_s(ranges, [("H100", 1)]) == float("inf")
    alone = [predict_rollout_s(ranges, [("A800", degree)]) for degree in DEGREES]
    assert alone == sorted(alone, reverse=True)
    assert predict_rollout_s(ranges, [("H100", 1), ("A800", 1)]) == alone[0]


def test_trajectory_holds_its_context_at_every_step() -> None:
    one = make_uniform_group(1, 100, 10)
    assert (one.prompt_tokens, one.generated_tokens, one.max_context_tokens) == (100, 10, 110)
    assert one.context_token_steps == pytest.approx(sum(100 + step + 0.5 for step in range(10)))


def test_merged_groups_sum_work_and_keep_the_longest() -> None:
    both = merge_groups([make_uniform_group(3, 10, 100, tool_s=5.0), make_uniform_group(2, 20, 50)])
    assert (both.requests, both.prompt_tokens, both.generated_tokens) == (5, 70, 400)
    assert (
        both.max_generated_tokens,
        both.max_prompt_tokens,
        both.max_context_tokens,
        both.max_tool_s,
    ) == (100, 20, 110, 5.0)


@given(st.integers(0, 1000), st.integers(1, 100))
def test_quantile_groups_cover_all_trajectories_in_order(seed: int, count: int) -> None:
    groups = lengths(random.Random(seed), 200, 1000, 1.0)
    random.Random(seed).shuffle(groups)
    found = group_by_quantiles(groups, count)
    assert len(found) <= count
    whole, parts = merge_groups(groups), merge_groups(found)
    assert (parts.requests, parts.max_generated_tokens) == (
        whole.requests,
        whole.max_generated_tokens,
    )
    assert parts.context_token_steps == pytest.approx(whole.context_token_steps)
    assert all(a.max_generated_tokens <= b.max_generated_tokens for a, b in pairwise(found))


def test_longest_trajectories_are_in_smaller_groups() -> None:
    found = group_by_quantiles(lengths(random.Random(0), 4096, 1000, 1.0), 64)
    assert len(found) == 64
    shares = [group.generated_tokens for group in found]
    assert max(shares) < 1.6 * sum(shares) / 64
    assert found[-1].requests < found[0].requests / 5


def test_more_accelerators_get_more_groups() -> None:
    assert choose_group_count(2) == 256
    assert choose_group_count(256) == 4096


SERVER = GangServer(
    DecodeCurve("A", 1, 1.0, 0.01, 0.001, prefill_tokens_per_s=100.0), 1000.0, slots=4
)


def test_few_trajectories_take_the_steps_of_the_longest() -> None:
    took = serves_s(SERVER, [make_uniform_group(1, 0, 10), make_uniform_group(2, 0, 20)])
    assert took == pytest.approx(20 + 0.01 * 50 + 0.001 * (50 + 2 * 200))


def test_many_trajectories_share_slots() -> None:
    assert serves_s(SERVER, [make_uniform_group(40, 0, 10)]) == pytest.approx(
        100 + 0.01 * 400 + 0.001 * 2000
    )


def test_large_contexts_share_memory() -> None:
    took = serves_s(SERVER, [make_uniform_group(10, 500, 10)])
    expected_tokens = 10 * 10 * 505
    assert took == pytest.approx(
        expected_tokens / 1000 + 0.01 * 100 + 0.001 * expected_tokens + 5000 / 100
    )


def test_large_batch_is_compute_bound() -> None:
    busy = replace(SERVER, slots=400, token_compute_s=0.5)
    took = serves_s(busy, [make_uniform_group(40, 0, 10)])
    assert took == pytest.approx(0.5 * 400 + 0.01 * 400 + 0.001 * 2000)


@pytest.mark.parametrize("batch", [16, 64, 256])
@pytest.mark.parametrize("degree", [1, 8])
def test_full_batch_takes_the_steps_of_the_cost_model(batch: int, degree: int) -> None:
    gang = EngineGang(QWEN_14B, load_accelerators()["A800"], degree)
    took = serves_s(GangServer.from_gang(gang), [make_uniform_group(batch, 0, 1000)])
    # Within the latency of all-reduces, which hides behind arithmetic here and does not there.
    assert took == pytest.approx(1000 * gang.predict_decode_step_s(batch, 500), rel=0.07)


def test_time_is_at_least_that_of_the_longest_trajectory_with_its_tools() -> None:
    took = serves_s(
        SERVER, [make_uniform_group(1, 0, 10, tool_s=60.0), make_uniform_group(1, 0, 20)]
    )
    assert took == pytest.approx(60 + 10 * SERVER.curve.predict_step_s(1, 5))


def test_oversized_trajectories_are_never_served() -> None:
    assert serves_s(SERVER, [make_uniform_group(1, 990, 20)]) == float("inf")
    ranges = RangeCosts(
        [SERVER],
        [
            make_uniform_group(1, 0, 10),
            make_uniform_group(1, 990, 20),
            make_uniform_group(1, 0, 30),
        ],
    )
    assert ranges.find_range_ends(0, 1e9).tolist() == [1, 1, 3, 3]


@given(st.integers(0, 10**6))
def test_range_cost_is_that_of_its_groups_and_its_reach_is_maximal(seed: int) -> None:
    rng = random.Random(seed)
    of = servers(QWEN_14B, ("A800", "L40S"), rng.choice((8, 256)))
    groups = lengths(rng, 12, rng.choice((300, 6000)), 1.2)
    ranges = RangeCosts(of, groups)
    for server, one in enumerate(of):
        first, end = sorted((rng.randrange(12), rng.randrange(1, 13)))
        end = max(end, first + 1)
        took = ranges.predict_range_s(server, first, end)
        assert took == pytest.approx(serves_s(one, groups[first:end]))
        if took == float("inf"):
            continue
        limit_s = took * rng.choice((0.999, 1.0, 1.001))
        reach = ranges.find_range_ends(server, limit_s)
        for begin, upto in enumerate(reach.tolist()):
            slack = limit_s * (1 + 1e-9)
            assert upto == begin or ranges.predict_range_s(server, begin, upto) <= slack
            if upto < 12:
                assert ranges.predict_range_s(server, begin, upto + 1) > limit_s * (1 - 1e-9)


def test_unordered_groups_are_rejected() -> None:
    with pytest.raises(ValueError, match="not ordered"):
        RangeCosts([SERVER], [make_uniform_group(1, 0, 20), make_uniform_group(1, 0, 10)])
