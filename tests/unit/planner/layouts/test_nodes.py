"""Gangs of powers of two in nodes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.layouts import brute
from meshrl.services.planner.layouts.nodes import LayoutNode, placed, supply, without

frees = st.lists(st.integers(1, 8), min_size=1, max_size=3)
degrees = st.lists(st.sampled_from((1, 2, 4, 8)), max_size=6)


def nodes_of(free: list[int]) -> list[LayoutNode]:
    return [LayoutNode("A", f"host{index}", count) for index, count in enumerate(free)]


def test_a_node_is_the_powers_of_two_that_it_is_the_sum_of() -> None:
    nodes = [*nodes_of([7, 12]), LayoutNode("B", "other", 5)]
    assert supply(nodes, {"A": 8, "B": 2}) == {
        ("A", 4): 8, ("A", 2): 2, ("A", 1): 1, ("A", 8): 8, ("B", 2): 4, ("B", 1): 1
    }  # fmt: skip
    assert supply(nodes, {"B": 8}) == {("B", 4): 4, ("B", 1): 1}


@given(frees, degrees)
def test_gangs_are_placed_exactly_where_they_fit(free: list[int], gangs: list[int]) -> None:
    nodes, wanted = nodes_of(free), [("A", degree) for degree in gangs]
    fits = brute.packs(
        tuple(sorted(("A", count) for count in free)),
        tuple(sorted(wanted, key=lambda gang: -gang[1])),
    )
    if not fits:
        with pytest.raises(ValueError, match="no node has"):
            placed(nodes, wanted)
        return
    used: Counter[str] = Counter()
    for (_, degree), place in zip(wanted, placed(nodes, wanted), strict=True):
        used[place] += degree
    assert all(used[node.place] <= node.free for node in nodes)


@given(frees, st.integers(0, 12), st.sampled_from((1, 2, 4)), degrees)
def test_what_is_taken_leaves_room_for_whatever_any_choice_leaves_room_for(
    free: list[int], units: int, unit: int, gangs: list[int]
) -> None:
    nodes = nodes_of(free)
    choices: set[tuple[int, ...]] = {tuple(free)}
    for _ in range(units):
        choices = {
            tuple(sorted((*left[:i], left[i] - unit, *left[i + 1 :])))
            for left in choices
            for i in range(len(left))
            if left[i] >= unit
        }
    taken = without(nodes, "A", units * unit, unit)
    assert (taken is None) == (not choices)
    if taken is None:
        return
    left, places = taken
    assert len(places) == units
    wanted = tuple(sorted((("A", degree) for degree in gangs), key=lambda gang: -gang[1]))
    ours = brute.packs(tuple(sorted((node.kind, node.free) for node in left)), wanted)
    any_choice = any(
        brute.packs(tuple(sorted(("A", count) for count in choice)), wanted) for choice in choices
    )
    assert ours == any_choice
