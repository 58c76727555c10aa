"""Steps that are played ahead take what their stages take, and longer where lengths differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.pool.demand.measured import LEVELS, Curve
from meshrl.services.planner.forecast.pipeline import played_s
from meshrl.services.planner.forecast.quantities import Demand, Split, StepRates, StepTerms

TERMS = StepTerms(groups=4, group_size=6, max_staleness=2, slots=64, bin_tokens=0)
ALIKE = Demand(trajectories=24, sampled=50.0, tool_s=0.0, trained=1250.0)
RATES = StepRates(Curve("cpu", 1, 0.02), friction=1.0, work_s=0.5, fixed_s=0.1, cores=0.0)


def tailed(sigma: float) -> Demand:
    """Lengths of this deviation of their logarithm."""
    drawn = np.random.default_rng(3).lognormal(0.0, sigma, 4000)
    return replace(ALIKE, shape=tuple(map(float, np.quantile(drawn, LEVELS))))


def test_a_slow_trainer_takes_its_own_time_whatever_the_lengths() -> None:
    slow = replace(RATES, work_s=30.0)
    assert played_s(ALIKE, slow, Split(3, 1), TERMS) == pytest.approx(30.1)
    assert played_s(ALIKE, slow, Split(2, 2), TERMS) == pytest.approx(15.1)
    assert played_s(tailed(0.8), slow, Split(3, 1), TERMS) == pytest.approx(30.1, rel=0.1)


def test_without_staleness_stages_follow_one_another() -> None:
    strict = replace(TERMS, max_staleness=0)
    assert played_s(ALIKE, RATES, Split(2, 1), strict) == pytest.approx(50 * 0.02 + 0.6)


def test_engines_that_are_full_share_what_they_generate() -> None:
    """A token takes as long as all that are at an engine: two engines generate twice as much."""
    full = replace(RATES, curve=Curve("cpu", 1, 0.0, 0.002), work_s=0.0, fixed_s=0.0)
    one, two = (played_s(ALIKE, full, Split(n, 1), TERMS) for n in (1, 2))
    assert one == pytest.approx(24 * 50 * 0.002, rel=0.05) and two == pytest.approx(one / 2)


def test_slots_bound_what_is_generated_together() -> None:
    few = replace(TERMS, slots=2)
    idle = replace(RATES, work_s=0.0, fixed_s=0.0)
    assert played_s(ALIKE, idle, Split(1, 1), few) == pytest.approx(24 * 50 * 0.02 / 2, rel=0.05)


def test_a_long_tail_takes_longer_although_the_mean_is_the_same() -> None:
    bound = replace(RATES, curve=Curve("cpu", 1, 0.05), work_s=0.2)
    takes = [played_s(tailed(sigma), bound, Split(3, 1), TERMS) for sigma in (0.1, 0.5, 1.0)]
    assert takes[0] < takes[1] < takes[2] and takes[2] > 1.5 * takes[0]


def test_tools_are_waited_for_and_nothing_else_is_where_engines_are_fast() -> None:
    tools = replace(ALIKE, tool_s=9.0)
    fast = replace(RATES, curve=Curve("cpu", 1, 1e-6), work_s=0.0, fixed_s=0.0)
    assert played_s(tools, fast, Split(4, 1), TERMS) == pytest.approx(9.0 / 3, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(
    sigma=st.floats(0.0, 1.2),
    base_s=st.floats(0.001, 0.1),
    work_s=st.floats(0.0, 10.0),
    tool_s=st.sampled_from([0.0, 1.0]),
    groups=st.sampled_from([1, 4, 40]),
)
def test_no_step_is_shorter_than_its_training_or_longer_than_all_after_another(
    sigma: float, base_s: float, work_s: float, tool_s: float, groups: int
) -> None:
    terms = replace(TERMS, groups=groups)
    now = replace(tailed(sigma), tool_s=tool_s)
    then = replace(RATES, curve=Curve("cpu", 1, base_s), work_s=work_s)
    found = played_s(now, then, Split(2, 1), terms)
    assert found == played_s(now, then, Split(2, 1), terms), "it is no chance"
    assert found >= 0.7 * (then.fixed_s + work_s)
    longest_s = 50 * max(now.shape) / float(np.mean(now.shape)) * base_s + tool_s
    assert found <= 4 * (longest_s + then.fixed_s + work_s)


def test_fewer_engines_that_are_as_fast_are_no_slower_alone_and_slower_when_full() -> None:
    narrow = Split(3, 1, speed=1.0, width=1 / 3)
    idle = replace(RATES, work_s=0.0, fixed_s=0.0)
    assert played_s(ALIKE, idle, narrow, TERMS) == played_s(ALIKE, idle, Split(1, 1), TERMS)
    full = replace(idle, curve=Curve("cpu", 1, 0.0, 0.002))
    wide_s = played_s(ALIKE, full, Split(3, 1), TERMS)
    assert played_s(ALIKE, full, narrow, TERMS) == pytest.approx(3 * wide_s)
