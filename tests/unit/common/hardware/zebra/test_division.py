"""Core shapes and hosted experts, within memory and by profiled costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.core_shapes import (
    MICROS,
    CoreShape,
    compute_costs,
    evaluate_shape,
)
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.expert_hosting import (
    ExpertHosting,
    ForwardCosts,
    HostingBounds,
    RankCounts,
    gather_and_squeeze,
    optimize_hosting,
)
from meshrl.common.hardware.zebra.expert_parallel import compute_expert_parallel_s
from meshrl.common.hardware.zebra.micro_batches import pack_micro_batches
from meshrl.common.hardware.zebra.profile import CostCurve, MixtureProfile
from meshrl.common.hardware.zebra.timeline import compute_makespan_s
from tests.unit.common.hardware.zebra.test_profile import LINE, PROFILE

ATTENTION_CURVE = CostCurve((1024, 4096), (0.002, 0.02))
BOTH_ATTEND = replace(PROFILE, slow=replace(PROFILE.slow, attention=ATTENTION_CURVE, head=LINE))
MARGIN = 0.1  # largest allowed excess over the best step; most results are the best
RANKS = (
    RankCounts(1, 1),
    RankCounts(2, 2),
    RankCounts(1, 2),
    RankCounts(2, 1),
    RankCounts(4, 2),
    RankCounts(2, 6),
)


def list_shapes(
    profile: MixtureProfile, lengths: dict[int, int], fast: int, slow: int
) -> list[CoreShape]:
    """List all feasible shapes by enumeration."""
    shapes = []
    for groups in range(1, min(fast, slow) + 1):
        for ranks in product(range(1, fast // groups + 1), range(1, slow // groups + 1)):
            if profile.experts % ranks[1]:
                continue
            for micros in MICROS:
                shapes.append(evaluate_shape(profile, lengths, groups, RankCounts(*ranks), micros))
    return [shape for shape in shapes if shape is not None]


def test_longer_sequences_need_more_of_the_fast_kind() -> None:
    attention_curve = CostCurve((1024, 4096, 16384), (0.0005, 0.004, 0.05))
    profile = replace(PROFILE, fast=replace(PROFILE.fast, attention=attention_curve))
    attention_shares = []
    for length in (1024, 16384):
        best = min(list_shapes(profile, {length: 24}, 4, 4), key=lambda shape: shape.step_s)
        attention_shares.append(best.attention_count / best.expert_count)
    assert attention_shares[0] <= attention_shares[1]


def test_memory_limit_moves_experts_or_makes_the_shape_infeasible() -> None:
    def shape_with_memory(memory: float) -> CoreShape | None:
        slow = replace(PROFILE.slow, memory_bytes=memory)
        return evaluate_shape(replace(PROFILE, slow=slow), {1024: 8}, 1, RankCounts(2, 2), 2)

    roomy, tight = shape_with_memory(1e11), shape_with_memory(1.2e9)
    assert roomy is not None and tight is not None
    assert tight.hosting.hosted_total >= 4 and sum(tight.hosting.on_expert_ranks) * 1e8 <= 1.2e9
    small_profile = replace(PROFILE, fast=replace(PROFILE.fast, memory_bytes=1.02e9))
    assert evaluate_shape(small_profile, {1024: 8}, 1, RankCounts(2, 2), 2) is None
    tight_profile = replace(
        PROFILE,
        fast=replace(PROFILE.fast, memory_bytes=1.05e9),
        slow=replace(PROFILE.slow, memory_bytes=1.2e9),
    )
    assert not list_shapes(tight_profile, {1024: 8}, 2, 2)


def test_expert_parallelism_needs_attention_costs_of_all_kinds() -> None:
    kinds = [BOTH_ATTEND.fast, BOTH_ATTEND.slow]
    assert compute_expert_parallel_s(BOTH_ATTEND, {2048: 32}, kinds, 8, 4, 2)
    assert (
        compute_expert_parallel_s(PROFILE, {2048: 32}, [PROFILE.fast, PROFILE.slow], 8, 4, 2)
        is None
    )


def test_step_time_is_timeline_plus_gradient_reduction() -> None:
    one = evaluate_shape(BOTH_ATTEND, {2048: 32}, 1, RankCounts(4, 4), 4)
    two = evaluate_shape(BOTH_ATTEND, {2048: 32}, 2, RankCounts(2, 2), 4)
    assert one is not None and two is not None
    attention = 2 * 3 / 4 * 1e8 / 1e10
    assert one.step_s - one.timeline.makespan_s == pytest.approx(attention)
    assert two.step_s - two.timeline.makespan_s > attention
    assert one.tokens_per_s == pytest.approx(2048 * 32 / one.step_s)
    assert (two.attention_count, two.expert_count) == (4, 4)


def test_costs_follow_the_profile() -> None:
    batches = pack_micro_batches({1024: 8}, 4, ATTENTION_CURVE)
    assert batches is not None and batches.max_tokens == 2048
    costs, elsewhere = compute_costs(PROFILE, RankCounts(4, 2), batches)
    assert costs.attention_s == pytest.approx(0.002)
    assert costs.experts_s == elsewhere == pytest.approx(2048 * 2 * 4 / 2 * 1e-6)
    # Two attention ranks send to each expert rank.
    assert costs.dispatch_s == pytest.approx(2048 * 2 * 2 * 4096 / 1e10)


@given(
    st.dictionaries(st.integers(1, 5000), st.integers(1, 6), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_every_sequence_is_in_one_micro_batch(lengths: dict[int, int], micros: int) -> None:
    batches = pack_micro_batches(lengths, micros, ATTENTION_CURVE)
    if batches is None:
        assert sum(lengths.values()) < micros
        return
    placed_lengths = sorted(length for micro in batches.lengths for length in micro)
    assert placed_lengths == sorted(length for length, n in lengths.items() for _ in range(n))
    assert all(batches.lengths) and len(batches.lengths) == micros
    # Graham (1969): at most the mean plus the longest one.
    mean = sum(ATTENTION_CURVE.interpolate_s(length) for length in placed_lengths) / micros
    assert (
        batches.compute_max_s(ATTENTION_CURVE)
        <= mean + ATTENTION_CURVE.interpolate_s(placed_lengths[-1]) + 1e-9
    )


def test_step_without_sequences_is_rejected() -> None:
    for lengths in ({}, {0: 3}, {1024: -1}, {1024: 0}):
        with pytest.raises(ConfigError):
            evaluate_shape(PROFILE, lengths, 1, RankCounts(2, 2), 2)


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, RankCounts, MicroBatchCosts, float]:
    """Draw layers, experts per layer, ranks, costs without hosting, and the cost of hosted
    experts.
    """
    ranks = draw(st.sampled_from(RANKS))
    experts = ranks.experts * draw(st.integers(1, 4))
    costs = MicroBatchCosts(
        attention_s=draw(st.floats(0.05, 1.5)),
        experts_s=draw(st.floats(0.05, 1.5)),
        head_s=draw(st.floats(0, 1)),
        dispatch_s=(sent := draw(st.floats(0, 0.3))),
        combine_s=sent,
    )
    return draw(st.integers(1, 4)), experts, ranks, costs, draw(st.floats(0.05, 1.5))


def chunk_sizes(ranks: RankCounts) -> tuple[int, int]:
    """Return how many experts an attention rank takes and an expert rank gives per chunk."""
    taken = max(1, ranks.experts // ranks.attention)
    return taken, taken * ranks.attention // ranks.experts


def all_hostings(
    layers: int, experts: int, ranks: RankCounts, bounds: HostingBounds
) -> list[ExpertHosting]:
    """List all hostings of complete chunks."""
    (taken, given), share = chunk_sizes(ranks), experts // ranks.experts
    return [
        ExpertHosting(
            ranks, tuple(taken * k for k in chunks), tuple(share - given * k for k in chunks)
        )
        for chunks in product(range(share // given + 1), repeat=layers)
        if sum(chunks) * taken <= bounds.max_hosted and sum(chunks) * given >= bounds.min_given
    ]


@given(groups(), st.integers(0, 30), st.integers(0, 30), st.integers(1, 4))
def test_hosting_keeps_all_experts_and_its_bounds(
    group: tuple[int, int, RankCounts, MicroBatchCosts, float],
    min_given: int,
    max_hosted: int,
    micros: int,
) -> None:
    layers, experts, ranks, costs, elsewhere = group
    bounds = HostingBounds(min_given, max_hosted)
    try:
        hosting = optimize_hosting(layers, micros, experts, ranks, costs, elsewhere, bounds)
    except ConfigError:
        assert not all_hostings(layers, experts, ranks, bounds)
        return
    forward = ForwardCosts(costs.attention_s, costs.experts_s, elsewhere)
    for one in (hosting, gather_and_squeeze(layers, experts, ranks, forward, bounds)):
        pairs = list(zip(one.on_attention_ranks, one.on_expert_ranks, strict=True))
        assert all(ranks.attention * h + ranks.experts * k == experts for h, k in pairs)
        assert (
            len(pairs) == layers
            and min(one.on_expert_ranks) >= 0
            and one.hosted_total <= max_hosted
        )
        assert layers * experts // ranks.experts - sum(one.on_expert_ranks) >= min_given


@given(groups(), st.integers(0, 30), st.integers(1, 4))
def test_hosting_is_near_optimal_and_never_worse_than_none(
    group: tuple[int, int, RankCounts, MicroBatchCosts, float], max_hosted: int, micros: int
) -> None:
    layers, experts, ranks, costs, elsewhere = group
    bounds = HostingBounds(0, max_hosted)
    hostings = all_hostings(layers, experts, ranks, bounds)
    assume(len(hostings) <= 130)

    def step_s(hosting: ExpertHosting) -> float:
        return compute_makespan_s(layers, micros, hosting.apply_to_costs(costs, elsewhere))

    step_found_s = step_s(
        optimize_hosting(layers, micros, experts, ranks, costs, elsewhere, bounds)
    )
    assert step_found_s <= compute_makespan_s(layers, micros, costs) + 1e-9
    assert step_found_s <= min(map(step_s, hostings)) * (1 + MARGIN)


def test_gathered_bubbles_host_chunks_in_some_layers() -> None:
    forward = ForwardCosts(attention_s=0.75, experts_s=1.0, hosted_experts_s=0.5)
    hosting = gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(0, 100))
    # A chunk fills (1.0 + 0.5) / 3 of a second, and each layer contributes half of that.
    assert hosting.on_attention_ranks == (0, 1, 0, 1, 0, 1) and hosting.on_expert_ranks == (
        3,
        2,
        3,
        2,
        3,
        2,
    )
    assert (
        gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(0, 2)).hosted_total == 2
    )
    assert (
        gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(5, 9)).hosted_total == 5
    )
    busy = forward._replace(attention_s=1.5)
    assert (
        gather_and_squeeze(6, 12, RankCounts(4, 4), busy, HostingBounds(0, 100)).hosted_total == 0
    )
    assert (
        gather_and_squeeze(6, 12, RankCounts(4, 4), busy, HostingBounds(3, 100)).hosted_total == 3
    )


def test_chunks_have_equal_expert_counts_on_both_sides() -> None:
    forward = ForwardCosts(0.1, 1.0, 0.5)
    wide = gather_and_squeeze(2, 24, RankCounts(2, 6), forward, HostingBounds(0, 100))
    assert all(hosted % 3 == 0 for hosted in wide.on_attention_ranks) and wide.hosted_total
    tall = gather_and_squeeze(2, 24, RankCounts(6, 3), forward, HostingBounds(0, 100))
    assert all((8 - kept) % 2 == 0 for kept in tall.on_expert_ranks) and tall.hosted_total


def test_indivisible_ranks_host_nothing_or_are_rejected() -> None:
    forward = ForwardCosts(0.1, 1.0, 0.5)
    assert (
        gather_and_squeeze(4, 12, RankCounts(4, 3), forward, HostingBounds(0, 9)).hosted_total == 0
    )
    with pytest.raises(ConfigError, match="cannot take equal numbers"):
        gather_and_squeeze(4, 12, RankCounts(4, 3), forward, HostingBounds(1, 9))
    with pytest.raises(ConfigError, match="cannot hold 5 experts"):
        gather_and_squeeze(4, 12, RankCounts(3, 3), forward, HostingBounds(5, 4))
    with pytest.raises(ConfigError, match="cannot be divided evenly"):
        gather_and_squeeze(4, 10, RankCounts(3, 3), forward, HostingBounds())


def test_costs_follow_the_hosting() -> None:
    hosted_costs = ExpertHosting(RankCounts(2, 4), (0, 2), (3, 2)).apply_to_costs(
        MicroBatchCosts(1.0, 3.0), hosted_experts_s=1.5
    )
    assert hosted_costs.hosted_s == (0.0, 1.0) and list(hosted_costs.expert_rank_shares) == [
        1.0,
        pytest.approx(2 / 3),
    ]
    base_costs = MicroBatchCosts(1.0, 3.0)
    assert (
        ExpertHosting(RankCounts(2, 4), (0, 0), (3, 3)).apply_to_costs(base_costs, 1.5)
        is base_costs
    )
