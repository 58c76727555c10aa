"""An engine at a declared pace: the same tokens, when the accelerator would have had them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.contract import TokenEngine
from meshrl.common.job.pace import PROFILES, Pace, profile
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from tests.unit.common.generation.engines_under_test import (
    Listener,
    StandingClock,
    built_in,
    request,
)

PACE = Pace(decode_s=0.01, plateau=2, prefill_tokens_per_s=1000.0)


def paced(slots: int = 4) -> tuple[TokenEngine, EmulatedSteps, StandingClock]:
    clock = StandingClock()
    engine = built_in("eager", slots, 256, clock=clock)
    return engine, EmulatedSteps(engine, PACE, clock), clock


def finished_at(steps: EmulatedSteps, clock: StandingClock, ids: list[int]) -> dict[int, float]:
    """Seconds at which each request's end was there, stepping whenever something is due."""
    began = clock.monotonic()
    ends: dict[int, float] = {}
    while len(ends) < len(ids):
        steps.step()
        flush = steps.drain()
        if flush is not None:
            for id, finish in zip(flush.ids.tolist(), flush.finish.tolist(), strict=True):
                if finish:
                    ends[id] = clock.monotonic() - began
        clock.pass_(max(steps.due_s, 1e-6))
        assert clock.monotonic() - began < 60
    return ends


@pytest.mark.parametrize(
    ("batch", "tokens", "step_s"), [(1, 30, 0.01), (2, 30, 0.01), (4, 30, 0.02)]
)
def test_decoding_is_flat_up_to_the_plateau_and_linear_beyond(
    batch: int, tokens: int, step_s: float
) -> None:
    engine, steps, clock = paced()
    engine.submit([request(i, (1,), max_new=tokens) for i in range(batch)])
    ends = finished_at(steps, clock, list(range(batch)))
    assert list(ends.values()) == pytest.approx([tokens * step_s] * batch, rel=0.1)


def test_known_tokens_cost_what_prefill_costs() -> None:
    engine, steps, clock = paced()
    engine.submit([request(1, range(1, 39), max_new=2)])
    first = finished_at(steps, clock, [1])[1]
    assert first == pytest.approx(37 / 1000 + 2 * 0.01, rel=0.1)


def test_a_session_pays_for_new_tokens_only() -> None:
    engine, steps, clock = paced()
    engine.submit([request(1, range(1, 39), max_new=2, session=7)])
    finished_at(steps, clock, [1])
    engine.submit([request(2, [*range(1, 39), 3], max_new=2, session=7)])
    assert finished_at(steps, clock, [2])[2] < 0.03


def test_no_token_shows_before_its_step_would_be_over() -> None:
    engine, steps, clock = paced()
    engine.submit([request(1, (1,), max_new=5)])
    assert steps.step()
    assert steps.drain() is None and not steps.ended
    clock.pass_(0.009)
    assert steps.step() and steps.drain() is None
    clock.pass_(0.0011)
    assert steps.step()
    flush = steps.drain()
    assert flush is not None and flush.counts.tolist() == [1]


def test_it_generates_what_the_engine_inside_would() -> None:
    engine, steps, clock = paced()
    ours = Listener(engine, lambda: clock.pass_(0.05), steps)
    ours.run(*(request(i, (1, 2, i + 1), max_new=12) for i in range(6)))
    plain = Listener(built_in("eager", 4, 256))
    plain.run(*(request(i, (1, 2, i + 1), max_new=12) for i in range(6)))
    for i in range(6):
        assert ours.heard[i].tokens == plain.heard[i].tokens
        assert ours.heard[i].finish == [Finish.LENGTH]


def test_an_abort_brings_what_was_there_and_nothing_later() -> None:
    engine, steps, clock = paced()
    listener = Listener(engine, lambda: clock.pass_(0.05), steps)
    engine.submit([request(1, (1,), max_new=50), request(2, (1,), max_new=3)])
    for _ in range(3):
        steps.step()
        listener.advance()
    engine.abort([1])
    listener.run()
    assert listener.heard[1].finish == [Finish.ABORTED]
    assert 1 <= len(listener.heard[1].tokens) <= 4
    assert len(listener.heard[2].tokens) == 3


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 5000))
def test_a_larger_batch_never_takes_less_and_never_brings_fewer_tokens_a_second(
    batch: int, steps: int, prefilled: int
) -> None:
    pace = PROFILES["a100-7b"]
    now, more = pace.step_s(batch, steps, prefilled), pace.step_s(batch + 1, steps, prefilled)
    assert more >= now
    assert (batch + 1) / pace.step_s(batch + 1, 1, 0) >= batch / pace.step_s(batch, 1, 0) * 0.999


def test_a_pace_of_a_higher_degree_reads_a_part_of_the_weights_and_gathers() -> None:
    one = PROFILES["a100-7b"]
    four = one.of_degree(4)
    gathers_s = 2 * 28 * 8e-6
    assert four.step_s(1, 1, 0) == pytest.approx(one.decode_s / 4 + gathers_s)
    assert four.step_s(0, 0, 1024) == pytest.approx(one.step_s(0, 0, 1024) / 4 + gathers_s)
    assert one.of_degree(1) == one
    declared = profile("20/32/6000").of_degree(2)
    assert declared.step_s(1, 1, 0) == pytest.approx(0.020 / 2 + 0.05 * 0.020)


@given(st.integers(1, 300), st.sampled_from([2, 4, 8]))
def test_a_higher_degree_answers_sooner_and_gives_less_for_each_worker(
    batch: int, degree: int
) -> None:
    one, more = PROFILES["a100-7b"], PROFILES["a100-7b"].of_degree(degree)
    assert one.step_s(batch, 1, 0) / degree < more.step_s(batch, 1, 0) < one.step_s(batch, 1, 0)


def test_an_engine_of_two_workers_has_the_pace_of_two_and_says_so() -> None:
    clock = StandingClock()
    pace = profile("20/4/1000")
    engine = built_in("eager", 4, 256, clock=clock)
    steps = EmulatedSteps(engine, pace, clock, 2)
    assert steps.tensor_parallel == 2
    engine.submit([request(1, (1,), max_new=30)])
    ends = finished_at(steps, clock, [1])
    assert ends[1] == pytest.approx(30 * (0.010 + 0.001), rel=0.1)


def test_a_profile_is_a_name_or_three_numbers() -> None:
    assert profile("18/32/6000") == Pace(0.018, 32, 6000.0)
    assert profile("h100-7b").decode_s == pytest.approx(2 * 7.6e9 / (3.35e12 * 0.85))
    for wrong in ("tpu", "18/32", "0/32/6000", "18/x/6000", ""):
        with pytest.raises(ConfigError, match="there is no pace"):
            profile(wrong)


def test_steps_that_end_late_are_counted_and_waiting_for_a_turn_is_none() -> None:
    engine, steps, clock = paced()
    engine.submit([request(1, (1,), max_new=10)])
    for pause_s in (0.01, 0.0105, 0.02):  # of 10 ms each: in time, within a tenth, late
        steps.begin()
        steps.step()
        clock.pass_(pause_s)
        steps.drain()
        clock.pass_(5.0)  # others compute
    assert (steps.paced, steps.late) == (3, 1)
    began = clock.monotonic()
    steps.begin()
    steps.step()
    assert steps.due_s == pytest.approx(0.01)  # nothing is made up for
    assert clock.monotonic() == began
