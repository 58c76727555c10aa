"""Plans against trying everything."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.layouts.brute import iteration_s
from loadtests.layouts.cases import small
from services.planner.layouts.allocation import allocate


@settings(max_examples=40, deadline=None)
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
