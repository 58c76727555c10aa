"""What gangs take to serve ranges of lengths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.layouts.cases import QWEN_14B, lengths, servers, serves_s
from meshrl.common.hardware.profiles import declared
from meshrl.common.state.pool.demand.measured import Curve
from meshrl.services.planner.costs.rollout import EngineGang
from meshrl.services.planner.layouts.grouping import alike
from meshrl.services.planner.layouts.serving import GangServer, Served

SERVER = GangServer(Curve("A", 1, 1.0, 0.01, 0.001, prefill_tokens_per_s=100.0), 1000.0, slots=4)


def test_few_trajectories_take_the_steps_of_the_longest() -> None:
    took = serves_s(SERVER, [alike(1, 0, 10), alike(2, 0, 20)])
    assert took == pytest.approx(20 + 0.01 * 50 + 0.001 * (50 + 2 * 200))


def test_many_take_turns_in_its_slots() -> None:
    assert serves_s(SERVER, [alike(40, 0, 10)]) == pytest.approx(100 + 0.01 * 400 + 0.001 * 2000)


def test_large_contexts_take_turns_in_its_memory() -> None:
    took = serves_s(SERVER, [alike(10, 500, 10)])
    held = 10 * 10 * 505
    assert took == pytest.approx(held / 1000 + 0.01 * 100 + 0.001 * held + 5000 / 100)


def test_a_large_batch_takes_its_arithmetic() -> None:
    busy = replace(SERVER, slots=400, busy_s=0.5)
    took = serves_s(busy, [alike(40, 0, 10)])
    assert took == pytest.approx(0.5 * 400 + 0.01 * 400 + 0.001 * 2000)


@pytest.mark.parametrize("batch", [16, 64, 256])
@pytest.mark.parametrize("degree", [1, 8])
def test_a_full_batch_takes_the_steps_of_the_cost_model(batch: int, degree: int) -> None:
    gang = EngineGang(QWEN_14B, declared()["A800"], degree)
    took = serves_s(GangServer.of(gang), [alike(batch, 0, 1000)])
    # Within the latency of all-reduces, which hides behind arithmetic here and does not there.
    assert took == pytest.approx(1000 * gang.step_s(batch, 500), rel=0.07)


def test_nothing_takes_less_than_the_longest_alone_with_its_tools() -> None:
    took = serves_s(SERVER, [alike(1, 0, 10, tool_s=60.0), alike(1, 0, 20)])
    assert took == pytest.approx(60 + 10 * SERVER.curve.step_s(1, 5))


def test_what_does_not_fit_is_never_served() -> None:
    assert serves_s(SERVER, [alike(1, 990, 20)]) == float("inf")
    ranges = Served([SERVER], [alike(1, 0, 10), alike(1, 990, 20), alike(1, 0, 30)])
    assert ranges.reach(0, 1e9).tolist() == [1, 1, 3, 3]


@given(st.integers(0, 10**6))
def test_ranges_take_what_their_groups_take_and_reach_as_far_as_they_can(seed: int) -> None:
    rng = random.Random(seed)
    of = servers(QWEN_14B, ("A800", "L40S"), rng.choice((8, 256)))
    groups = lengths(rng, 12, rng.choice((300, 6000)), 1.2)
    ranges = Served(of, groups)
    for server, one in enumerate(of):
        first, end = sorted((rng.randrange(12), rng.randrange(1, 13)))
        end = max(end, first + 1)
        took = ranges.seconds(server, first, end)
        assert took == pytest.approx(serves_s(one, groups[first:end]))
        if took == float("inf"):
            continue
        limit_s = took * rng.choice((0.999, 1.0, 1.001))
        reach = ranges.reach(server, limit_s)
        for begin, upto in enumerate(reach.tolist()):
            slack = limit_s * (1 + 1e-9)
            assert upto == begin or ranges.seconds(server, begin, upto) <= slack
            if upto < 12:
                assert ranges.seconds(server, begin, upto + 1) > limit_s * (1 - 1e-9)


def test_groups_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="not in order"):
        Served([SERVER], [alike(1, 0, 20), alike(1, 0, 10)])
