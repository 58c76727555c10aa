"""Trajectories in groups of lengths."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.layouts.cases import lengths
from meshrl.services.planner.layouts.grouping import alike, groups_for, quantiles, together


def test_one_trajectory_holds_its_context_at_every_step() -> None:
    one = alike(1, 100, 10)
    assert (one.prompts, one.generated, one.longest_context) == (100, 10, 110)
    assert one.held == pytest.approx(sum(100 + step + 0.5 for step in range(10)))


def test_groups_are_summed_and_keep_their_longest() -> None:
    both = together([alike(3, 10, 100, tool_s=5.0), alike(2, 20, 50)])
    assert (both.requests, both.prompts, both.generated) == (5, 70, 400)
    assert (both.longest, both.prompt, both.longest_context, both.tool_s) == (100, 20, 110, 5.0)


@given(st.integers(0, 1000), st.integers(1, 100))
def test_quantiles_lose_nothing_and_keep_the_order(seed: int, count: int) -> None:
    groups = lengths(random.Random(seed), 200, 1000, 1.0)
    random.Random(seed).shuffle(groups)
    found = quantiles(groups, count)
    assert len(found) <= count
    whole, parts = together(groups), together(found)
    assert (parts.requests, parts.longest) == (whole.requests, whole.longest)
    assert parts.held == pytest.approx(whole.held)
    assert all(a.longest <= b.longest for a, b in pairwise(found))


def test_the_longest_are_in_groups_of_fewer() -> None:
    found = quantiles(lengths(random.Random(0), 4096, 1000, 1.0), 64)
    assert len(found) == 64
    shares = [group.generated for group in found]
    assert max(shares) < 1.6 * sum(shares) / 64
    assert found[-1].requests < found[0].requests / 5


def test_more_accelerators_are_given_more_groups() -> None:
    assert groups_for(2) == 256
    assert groups_for(256) == 4096
