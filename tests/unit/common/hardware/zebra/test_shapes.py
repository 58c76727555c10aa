"""A division of a core keeps to memory, and takes what its profile says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.asymmetry import RankCounts
from meshrl.common.hardware.zebra.batches import spread
from meshrl.common.hardware.zebra.profile import CostCurve, Profile
from meshrl.common.hardware.zebra.shapes import MICROS, CoreShape, costs_of, shape_of
from meshrl.common.hardware.zebra.together import expert_parallel_s
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
