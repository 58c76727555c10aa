"""Chunks are paired by what lies in them, wherever else the same bytes lie."""

from __future__ import annotations

from itertools import zip_longest

from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.weights import Tensor
from meshrl.common.weights.delta.codec import Pair, grouped, paired


def piece(name: str, begin: int, chunk: str, offset: int = 0, end: int = -1) -> Tensor:
    """Of a bfloat16 tensor of 100 elements."""
    end = end if end >= 0 else begin + 50
    return Tensor(name, "BF16", [100], chunk, offset, (end - begin) * 2, 0, begin, end)


def test_chunks_with_the_same_pieces_are_paired() -> None:
    base = [piece("w", 0, "a"), piece("w", 50, "b"), piece("v", 0, "c", end=100)]
    target = [piece("w", 0, "A"), piece("w", 50, "b"), piece("v", 0, "C", end=100)]
    assert paired(base, target) == [Pair("a", "A", 2, 100), Pair("c", "C", 2, 200)]


def test_what_was_cut_otherwise_has_no_pair() -> None:
    base = [piece("w", 0, "a"), piece("w", 50, "a", 100)]
    assert paired(base, [piece("w", 0, "A", end=100)]) == []
    assert paired(base, [piece("w", 0, "A", 100), piece("w", 50, "A")]) == []
    assert paired(base, [piece("v", 0, "A")]) == []
    assert paired([], base) == []


def test_one_that_two_chunks_have_become_has_none() -> None:
    base = [piece("w", 0, "a"), piece("w", 50, "b", 100)]
    assert paired(base, [piece("w", 0, "A"), piece("w", 50, "A", 100)]) == []


def test_what_was_alike_and_is_not_any_more_is_paired_with_what_it_was() -> None:
    base = [piece("w", 0, "same"), piece("w", 50, "same")]
    target = [piece("w", 0, "A"), piece("w", 50, "B")]
    assert paired(base, target) == [Pair("same", "A", 2, 100), Pair("same", "B", 2, 100)]
    assert paired(target, base) == []


@given(st.lists(st.integers(1, 50)), st.integers(1, 100))
def test_groups_have_all_pairs_in_order_and_are_no_larger_than_they_need_be(
    sizes: list[int], most: int
) -> None:
    pairs = [Pair(f"a{i}", f"b{i}", 2, size) for i, size in enumerate(sizes)]
    groups = list(grouped(pairs, most))
    assert [pair for group in groups for pair in group] == pairs
    nothing: list[Pair] = []
    for group, following in zip_longest(groups, groups[1:], fillvalue=nothing):
        held = sum(pair.size for pair in group)
        assert len(group) == 1 or held <= most
        assert not following or held + following[0].size > most
