"""Divisions of a core and hosted experts keep to memory and take what profiles give."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.asymmetry import (
    ExpertHosting,
    Forward,
    HostingBounds,
    RankCounts,
    gather_and_squeeze,
    hosting,
)
from meshrl.common.hardware.zebra.batches import spread
from meshrl.common.hardware.zebra.costs import Costs
from meshrl.common.hardware.zebra.profile import CostCurve, Profile
from meshrl.common.hardware.zebra.shapes import MICROS, CoreShape, costs_of, shape_of
from meshrl.common.hardware.zebra.timeline import makespan
from meshrl.common.hardware.zebra.together import expert_parallel_s
from tests.unit.common.hardware.zebra.test_profile import LINE, PROFILE

ATTENDS = CostCurve((1024, 4096), (0.002, 0.02))
BOTH = replace(PROFILE, slow=replace(PROFILE.slow, attention=ATTENDS, head=LINE))
MARGIN = 0.1  # of the best step, at most; most are it
RANKS = (
    RankCounts(1, 1),
    RankCounts(2, 2),
    RankCounts(1, 2),
    RankCounts(2, 1),
    RankCounts(4, 2),
    RankCounts(2, 6),
)


def every_shape(profile: Profile, lengths: dict[int, int], fast: int, slow: int) -> list[CoreShape]:
    """All that fit, one by one."""
    found = []
    for groups in range(1, min(fast, slow) + 1):
        for ranks in product(range(1, fast // groups + 1), range(1, slow // groups + 1)):
            if profile.experts % ranks[1]:
                continue
            for micros in MICROS:
                found.append(shape_of(profile, lengths, groups, RankCounts(*ranks), micros))
    return [shape for shape in found if shape is not None]


def test_longer_sequences_want_more_of_the_fast_kind() -> None:
    attends = CostCurve((1024, 4096, 16384), (0.0005, 0.004, 0.05))
    profile = replace(PROFILE, fast=replace(PROFILE.fast, attention=attends))
    shares = []
    for length in (1024, 16384):
        best = min(every_shape(profile, {length: 24}, 4, 4), key=lambda shape: shape.step_s)
        shares.append(best.attention / best.experts)
    assert shares[0] <= shares[1]


def test_memory_sends_experts_to_attention_ranks_or_leaves_nothing() -> None:
    def on(memory: float) -> CoreShape | None:
        slow = replace(PROFILE.slow, memory_bytes=memory)
        return shape_of(replace(PROFILE, slow=slow), {1024: 8}, 1, RankCounts(2, 2), 2)

    roomy, tight = on(1e11), on(1.2e9)
    assert roomy is not None and tight is not None
    assert tight.hosting.held >= 4 and sum(tight.hosting.kept) * 1e8 <= 1.2e9
    full = replace(PROFILE, fast=replace(PROFILE.fast, memory_bytes=1.02e9))
    assert shape_of(full, {1024: 8}, 1, RankCounts(2, 2), 2) is None
    nearly = replace(
        PROFILE,
        fast=replace(PROFILE.fast, memory_bytes=1.05e9),
        slow=replace(PROFILE.slow, memory_bytes=1.2e9),
    )
    assert not every_shape(nearly, {1024: 8}, 2, 2)


def test_a_kind_whose_attention_nobody_measured_takes_no_part_in_expert_parallelism() -> None:
    kinds = [BOTH.fast, BOTH.slow]
    assert expert_parallel_s(BOTH, {2048: 32}, kinds, 8, 4, 2)
    assert expert_parallel_s(PROFILE, {2048: 32}, [PROFILE.fast, PROFILE.slow], 8, 4, 2) is None


def test_a_step_is_its_timeline_and_the_sum_of_gradients() -> None:
    one = shape_of(BOTH, {2048: 32}, 1, RankCounts(4, 4), 4)
    two = shape_of(BOTH, {2048: 32}, 2, RankCounts(2, 2), 4)
    assert one is not None and two is not None
    attention = 2 * 3 / 4 * 1e8 / 1e10
    assert one.step_s - one.timeline.makespan == pytest.approx(attention)
    assert two.step_s - two.timeline.makespan > attention
    assert one.tokens_per_s == pytest.approx(2048 * 32 / one.step_s)
    assert (two.attention, two.experts) == (4, 4)


def test_costs_are_the_profiles() -> None:
    batches = spread({1024: 8}, 4, ATTENDS)
    assert batches is not None and batches.tokens == 2048
    costs, elsewhere = costs_of(PROFILE, RankCounts(4, 2), batches)
    assert costs.attention == pytest.approx(0.002)
    assert costs.experts == elsewhere == pytest.approx(2048 * 2 * 4 / 2 * 1e-6)
    assert costs.dispatch == pytest.approx(2048 * 2 * 2 * 4096 / 1e10)  # two send to each


@given(
    st.dictionaries(st.integers(1, 5000), st.integers(1, 6), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_every_sequence_is_in_one_micro_batch(lengths: dict[int, int], micros: int) -> None:
    found = spread(lengths, micros, ATTENDS)
    if found is None:
        assert sum(lengths.values()) < micros
        return
    placed = sorted(length for micro in found.micros for length in micro)
    assert placed == sorted(length for length, n in lengths.items() for _ in range(n))
    assert all(found.micros) and len(found.micros) == micros
    # Graham 1969: no more than a mean beside the longest one.
    mean = sum(ATTENDS.of(length) for length in placed) / micros
    assert found.seconds(ATTENDS) <= mean + ATTENDS.of(placed[-1]) + 1e-9


def test_a_step_without_sequences_is_refused() -> None:
    for lengths in ({}, {0: 3}, {1024: -1}, {1024: 0}):
        with pytest.raises(ConfigError):
            shape_of(PROFILE, lengths, 1, RankCounts(2, 2), 2)


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, RankCounts, Costs, float]:
    """Layers, experts of a layer, ranks, costs with nothing hosted, experts on attention ranks."""
    ranks = draw(st.sampled_from(RANKS))
    experts = ranks.experts * draw(st.integers(1, 4))
    costs = Costs(
        attention=draw(st.floats(0.05, 1.5)),
        experts=draw(st.floats(0.05, 1.5)),
        head=draw(st.floats(0, 1)),
        dispatch=(sent := draw(st.floats(0, 0.3))),
        combine=sent,
    )
    return draw(st.integers(1, 4)), experts, ranks, costs, draw(st.floats(0.05, 1.5))


def chunk(ranks: RankCounts) -> tuple[int, int]:
    """Experts that an attention rank takes and an expert rank gives at a time."""
    taken = max(1, ranks.experts // ranks.attention)
    return taken, taken * ranks.attention // ranks.experts


def all_hostings(
    layers: int, experts: int, ranks: RankCounts, bounds: HostingBounds
) -> list[ExpertHosting]:
    """Every way to host whole chunks."""
    (taken, given), share = chunk(ranks), experts // ranks.experts
    return [
        ExpertHosting(
            ranks, tuple(taken * k for k in chunks), tuple(share - given * k for k in chunks)
        )
        for chunks in product(range(share // given + 1), repeat=layers)
        if sum(chunks) * taken <= bounds.most and sum(chunks) * given >= bounds.least
    ]


@given(groups(), st.integers(0, 30), st.integers(0, 30), st.integers(1, 4))
def test_no_expert_is_lost_and_memory_is_kept_to(
    group: tuple[int, int, RankCounts, Costs, float], least: int, most: int, micros: int
) -> None:
    layers, experts, ranks, costs, elsewhere = group
    bounds = HostingBounds(least, most)
    try:
        found = hosting(layers, micros, experts, ranks, costs, elsewhere, bounds)
    except ConfigError:
        assert not all_hostings(layers, experts, ranks, bounds)
        return
    forward = Forward(costs.attention, costs.experts, elsewhere)
    for one in (found, gather_and_squeeze(layers, experts, ranks, forward, bounds)):
        pairs = list(zip(one.hosted, one.kept, strict=True))
        assert all(ranks.attention * h + ranks.experts * k == experts for h, k in pairs)
        assert len(pairs) == layers and min(one.kept) >= 0 and one.held <= most
        assert layers * experts // ranks.experts - sum(one.kept) >= least


@given(groups(), st.integers(0, 30), st.integers(1, 4))
def test_it_is_about_the_best_and_never_worse_than_nothing(
    group: tuple[int, int, RankCounts, Costs, float], most: int, micros: int
) -> None:
    layers, experts, ranks, costs, elsewhere = group
    bounds = HostingBounds(0, most)
    choices = all_hostings(layers, experts, ranks, bounds)
    assume(len(choices) <= 130)

    def step_s(one: ExpertHosting) -> float:
        return makespan(layers, micros, one.costs(costs, elsewhere))

    ours = step_s(hosting(layers, micros, experts, ranks, costs, elsewhere, bounds))
    assert ours <= makespan(layers, micros, costs) + 1e-9
    assert ours <= min(map(step_s, choices)) * (1 + MARGIN)


def test_gathered_bubbles_move_chunks_in_some_layers() -> None:
    forward = Forward(attention=0.75, experts=1.0, elsewhere=0.5)
    found = gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(0, 100))
    # A chunk fills (1.0 + 0.5) / 3 of a second, and each layer gathers half of that.
    assert found.hosted == (0, 1, 0, 1, 0, 1) and found.kept == (3, 2, 3, 2, 3, 2)
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(0, 2)).held == 2
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(5, 9)).held == 5
    busy = forward._replace(attention=1.5)
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), busy, HostingBounds(0, 100)).held == 0
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), busy, HostingBounds(3, 100)).held == 3


def test_chunks_are_of_as_many_experts_on_either_side() -> None:
    forward = Forward(0.1, 1.0, 0.5)
    wide = gather_and_squeeze(2, 24, RankCounts(2, 6), forward, HostingBounds(0, 100))
    assert all(hosted % 3 == 0 for hosted in wide.hosted) and wide.held
    tall = gather_and_squeeze(2, 24, RankCounts(6, 3), forward, HostingBounds(0, 100))
    assert all((8 - kept) % 2 == 0 for kept in tall.kept) and tall.held


def test_ranks_that_do_not_divide_host_nothing_or_are_refused() -> None:
    forward = Forward(0.1, 1.0, 0.5)
    assert gather_and_squeeze(4, 12, RankCounts(4, 3), forward, HostingBounds(0, 9)).held == 0
    with pytest.raises(ConfigError, match="cannot take as many each"):
        gather_and_squeeze(4, 12, RankCounts(4, 3), forward, HostingBounds(1, 9))
    with pytest.raises(ConfigError, match="cannot hold 5 experts"):
        gather_and_squeeze(4, 12, RankCounts(3, 3), forward, HostingBounds(5, 4))
    with pytest.raises(ConfigError, match="do not spread evenly"):
        gather_and_squeeze(4, 10, RankCounts(3, 3), forward, HostingBounds())


def test_costs_follow_what_is_hosted() -> None:
    moved = ExpertHosting(RankCounts(2, 4), (0, 2), (3, 2)).costs(Costs(1.0, 3.0), elsewhere=1.5)
    assert moved.hosted == (0.0, 1.0) and list(moved.kept) == [1.0, pytest.approx(2 / 3)]
    nothing = Costs(1.0, 3.0)
    assert ExpertHosting(RankCounts(2, 4), (0, 0), (3, 3)).costs(nothing, 1.5) is nothing
