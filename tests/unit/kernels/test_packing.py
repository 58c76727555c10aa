"""Packing of sequences into bins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.packing import pack

lengths_of_a_step = st.lists(st.integers(1, 320), max_size=80)


@given(lengths_of_a_step, st.integers(320, 4096))
def test_every_sequence_lies_in_one_place_and_none_overlap(lengths, budget):
    seen = []
    for layout in pack(lengths, budget):
        taken = set()
        for item, row, start in zip(layout.item, layout.row, layout.start, strict=True):
            cells = {(row, start + offset) for offset in range(lengths[item])}
            assert 0 <= row < layout.rows and start + lengths[item] <= layout.width
            assert not cells & taken
            taken |= cells
            seen.append(item)
        assert {row for row, _ in taken} == set(range(layout.rows))
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths_of_a_step, st.integers(320, 4096))
def test_the_budget_is_kept(lengths, budget):
    assert all(layout.rows * layout.width <= budget for layout in pack(lengths, budget))


@given(lengths_of_a_step, st.integers(1, 4096))
def test_a_sequence_past_the_budget_lies_alone(lengths, budget):
    for layout in pack(lengths, budget):
        if layout.rows * layout.width > budget:
            assert layout.rows == 1 and layout.width == lengths[layout.item[0]]
            assert len(layout.item) == 1


@given(lengths_of_a_step)
def test_the_same_lengths_always_pack_the_same_way(lengths):
    assert pack(lengths, 2560) == pack(tuple(lengths), 2560)


@given(st.lists(st.integers(1, 320), min_size=60, max_size=80))
def test_hardly_a_token_is_padding_when_there_is_much_to_pack(lengths):
    bins = pack(lengths, 2560)
    padded = sum(layout.rows * layout.width for layout in bins[:-1])
    real = sum(lengths[item] for layout in bins[:-1] for item in layout.item)
    assert real >= 0.7 * padded


def test_short_sequences_do_not_lie_in_wide_rows():
    bins = pack([300] * 8 + [30] * 200, 2560)
    assert max(layout.width for layout in bins) == 304
    assert bins[-1].width == 96


def test_nothing_packs_into_nothing_and_an_empty_sequence_is_refused():
    assert pack([], 2560) == []
    with pytest.raises(ValueError, match="no tokens"):
        pack([3, 0], 2560)
