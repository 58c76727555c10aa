"""What gangs that exist take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.layouts import brute
from loadtests.layouts.cases import DEGREES, QWEN_14B, servers, small
from meshrl.services.planner.balance.shapes import rollout_s
from meshrl.services.planner.layouts.allocation import NO_TRAINING, allocate
from meshrl.services.planner.layouts.grouping import alike
from meshrl.services.planner.layouts.serving import Served


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_gangs_take_the_least_of_all_ways_to_cut_lengths_for_them(seed: int) -> None:
    case, rng = small(seed), random.Random(seed)
    ranges = case.ranges
    gangs = [rng.choice(ranges.kinds) for _ in range(rng.randint(1, 4))]
    whole = [(f"{kind} x {degree}", degree) for kind, degree in ranges.kinds]
    left = tuple(sorted((f"{kind} x {degree}", degree) for kind, degree in gangs))
    tried = brute.rollout_s(whole, left, brute.partitions(ranges.groups), case.cost)
    assert rollout_s(ranges, gangs, 1e-9) == pytest.approx(tried, rel=2e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_the_gangs_of_a_plan_take_what_the_plan_says(seed: int) -> None:
    case = small(seed)
    plan = allocate(case.ranges, case.nodes, [NO_TRAINING], 1e-9)
    if plan is not None:
        gangs = [(gang.kind, gang.degree) for gang in plan.gangs]
        assert rollout_s(case.ranges, gangs, 1e-9) == pytest.approx(plan.rollout_s, rel=2e-9)


def test_no_gangs_and_gangs_without_a_server_serve_nobody() -> None:
    ranges = Served(servers(QWEN_14B, ("A800",)), [alike(8, 100, 1000)])
    assert rollout_s(ranges, []) == float("inf")
    assert rollout_s(ranges, [("H100", 1)]) == float("inf")
    alone = [rollout_s(ranges, [("A800", degree)]) for degree in DEGREES]
    assert alone == sorted(alone, reverse=True)
    assert rollout_s(ranges, [("H100", 1), ("A800", 1)]) == alone[0]
