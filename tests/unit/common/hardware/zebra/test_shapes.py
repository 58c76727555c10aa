"""The shape that is chosen is the fastest of all that fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.base.errors import ConfigError
from common.hardware.zebra.asymmetry import RankCounts
from common.hardware.zebra.batches import spread
from common.hardware.zebra.prices import costs_of
from common.hardware.zebra.profile import CostCurve, Profile
from common.hardware.zebra.shapes import MICROS, CoreShape, choose, shape_of
from tests.unit.common.hardware.zebra.test_profile import LINE, PROFILE

ATTENDS = CostCurve((1024, 4096), (0.002, 0.02))
BOTH = replace(PROFILE, slow=replace(PROFILE.slow, attention=ATTENDS, head=LINE))


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


@settings(max_examples=15)
@given(
    fast=st.integers(1, 4),
    slow=st.integers(1, 4),
    lengths=st.dictionaries(st.sampled_from((512, 2048, 8192)), st.integers(1, 9), min_size=1),
    experts_s=st.floats(1e-7, 1e-5),
    memory=st.floats(1.5e9, 1e10),
)
def test_it_is_the_fastest_of_all(
    fast: int, slow: int, lengths: dict[int, int], experts_s: float, memory: float
) -> None:
    kind = replace(PROFILE.slow, experts=CostCurve((1,), (experts_s,)), memory_bytes=memory)
    profile = replace(PROFILE, slow=kind)
    all_of_them = every_shape(profile, lengths, fast, slow)
    found = choose(profile, lengths, fast, slow)
    if found.best is None:
        assert not all_of_them
        return
    least = min(shape.step_s for shape in all_of_them)
    assert found.best.step_s == pytest.approx(least)
    assert found.best in all_of_them
    assert found == choose(profile, lengths, fast, slow)
    assert found.considered >= len(all_of_them)


def test_of_equals_it_takes_fewer_accelerators_and_micro_batches() -> None:
    free = CostCurve((1,), (0.0,))
    nothing = replace(
        PROFILE,
        fast=replace(PROFILE.fast, experts=free, attention=free, head=free),
        slow=replace(PROFILE.slow, experts=free),
        link_bytes_per_s=1e30,
        link_latency_s=1e-3,  # all that a step takes
    )
    best = choose(nothing, {1024: 8}, 3, 3).best
    assert best is not None and best.step_s == pytest.approx(4 * PROFILE.layers * 1e-3)
    assert (best.groups, best.ranks, best.micros, best.hosting.held) == (1, RankCounts(1, 1), 1, 0)


def test_longer_sequences_want_more_of_the_fast_kind() -> None:
    attends = CostCurve((1024, 4096, 16384), (0.0005, 0.004, 0.05))
    profile = replace(PROFILE, fast=replace(PROFILE.fast, attention=attends))
    shares = []
    for length in (1024, 16384):
        best = choose(profile, {length: 24}, 8, 8).best
        assert best is not None
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
    assert choose(nearly, {1024: 8}, 2, 2).best is None


def test_what_could_be_done_instead_is_told() -> None:
    found = choose(BOTH, {2048: 32}, 4, 4)
    assert found.best is not None and found.together and found.fast_only
    better = max(found.together, found.fast_only)
    assert found.gain == pytest.approx(found.best.tokens_per_s / better)
    unknown = choose(PROFILE, {2048: 32}, 4, 4)
    assert unknown.together is None and unknown.fast_only == found.fast_only
    without = choose(BOTH, {2048: 32}, 4, 0)
    assert without.best is None and without.gain is None and without.fast_only


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
            choose(PROFILE, lengths, 2, 2)
