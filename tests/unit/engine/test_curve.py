"""Pace of an engine: the curve of decode steps, its throughput, and emulation of a pace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.job.emulation import ENGINE_PROFILES, EmulatedEngineSpeed, parse_engine_speed
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.services.engine.measurement.curve import WINDOW_STEPS, CurveFit
from meshrl.services.engine.measurement.throughput import Throughput, context_class, size_class
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.sim.engines.simulated_engine import SimulatedEngine
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.common.generation.engines_under_test import (
    Listener,
    StandingClock,
    built_in,
    request,
)

TRUTH = DecodeCurve("cpu", 1, 0.02, 5e-4, 2e-7, 6000.0)
PLACES = [(batch, context) for batch in (1, 4, 12, 32) for context in (50, 400, 2000)]


def fitted(truth: DecodeCurve, noise: float, steps: int = 3000, seed: int = 0) -> CurveFit:
    """From steps whose batches and contexts drift, some of which compute prompts beside."""
    random, fit = np.random.default_rng(seed), CurveFit()
    for step in range(steps):
        batch = int(random.integers(1, 33))
        context = 100 + 1000 * step / steps * random.random()
        prompt = int(random.integers(0, 500)) if random.random() < 0.1 else 0
        took_s = truth.predict_step_s(batch, context) + prompt / truth.prefill_tokens_per_s
        took_s *= float(np.exp(noise * random.normal() - noise**2 / 2))
        fit.add_steps(1, batch, batch * context, prompt, took_s)
    return fit


def known(fit: CurveFit) -> DecodeCurve:
    found = fit.get_curve("cpu", 1)
    assert found is not None
    return found


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_a_curve_is_recovered_within_a_twentieth(noise: float, seed: int) -> None:
    found = known(fitted(TRUTH, noise, seed=seed))
    for batch, context in PLACES:
        assert found.predict_step_s(batch, context) == pytest.approx(
            TRUTH.predict_step_s(batch, context), rel=0.05
        ), (batch, context)
    assert found.prefill_tokens_per_s == pytest.approx(6000.0, rel=0.05)
    assert found.fitted_steps == 3000


@pytest.mark.parametrize("truth", [DecodeCurve("cpu", 1, 0.03), DecodeCurve("cpu", 1, 0.0, 1e-3)])
def test_a_term_that_is_not_there_is_none_and_none_is_negative(truth: DecodeCurve) -> None:
    found = known(fitted(DecodeCurve("cpu", 1, truth.base_s, truth.sequence_s, 0.0, 1e9), 0.2))
    assert min(found.base_s, found.sequence_s, found.context_s) >= 0
    for batch, context in PLACES[3:]:
        assert found.predict_step_s(batch, context) == pytest.approx(
            truth.predict_step_s(batch, context), rel=0.2
        ), (batch, context)


def test_one_batch_size_alone_says_its_own_step_and_that_most_of_it_is_for_any_size() -> None:
    fit = CurveFit()
    for _ in range(400):
        fit.add_steps(1, 8, 8 * 100.0, 0, 0.02)
    found = known(fit)
    assert found.predict_step_s(8, 100) == pytest.approx(0.02, rel=0.01)
    assert 0.7 < found.base_s / 0.02 < 0.9


def test_a_machine_that_becomes_slower_is_seen_within_seconds() -> None:
    fit = fitted(TRUTH, 0.05)
    for _ in range(500):
        fit.add_steps(1, 8, 8 * 300.0, 0, 2 * TRUTH.predict_step_s(8, 300))
    found = known(fit)
    assert found.predict_step_s(8, 300) == pytest.approx(2 * TRUTH.predict_step_s(8, 300), rel=0.06)


def test_a_step_that_stood_for_long_does_not_count_for_what_it_took() -> None:
    fit = fitted(TRUTH, 0.05)
    before = known(fit).predict_step_s(8, 300)
    for n in range(4 * WINDOW_STEPS):
        fit.add_steps(1, 8, 8 * 300.0, 0, TRUTH.predict_step_s(8, 300) + 60.0 * (n == 0))
    assert known(fit).predict_step_s(8, 300) < 1.5 * before


def test_there_is_no_curve_before_a_few_windows_nor_of_prompts_alone() -> None:
    fit = CurveFit()
    assert fit.get_curve("cpu", 1) is None
    for _ in range(3 * WINDOW_STEPS):
        fit.add_steps(1, 2, 20.0, 0, 0.01)
    assert fit.get_curve("cpu", 1) is None
    prompts = CurveFit()
    for _ in range(100):
        prompts.add_steps(1, 0, 0.0, 512, 0.1)
    assert prompts.get_curve("cpu", 1) is None


def serving(
    engine: TokenEngine, clock: StandingClock, pace: EmulatedEngineSpeed | None = None
) -> EngineService:
    mesh = alone("engine/g0", clock, Random(0), SimulatedHost(clock, Random(0)))
    emulated = EmulatedSteps(engine, pace, clock) if pace is not None else None
    return EngineService(mesh, engine, lambda action: action(), emulation=emulated)


def run(service: EngineService, clock: StandingClock, batches: list[int], tokens: int) -> None:
    """One batch after the other, to the end of each."""
    number = 0
    for batch in batches:
        asked = [request(number + i, (1, 2, 3, 4), max_new=tokens) for i in range(batch)]
        number += batch
        service.admit(asked, [])
        while service.engine.num_running or service.engine.num_waiting:
            service.run_once()
            clock.pass_(max(service.steps.next_step_delay_s, 1e-6))


@pytest.mark.parametrize("batches", [[1, 4, 2, 3] * 3, [4, 4, 4]])
def test_a_paced_engine_below_its_plateau_is_found_to_keep_its_pace(batches: list[int]) -> None:
    clock, pace = StandingClock(), EmulatedEngineSpeed(0.01, 4, 1000.0)
    service = serving(built_in("eager", 8, 256, clock=clock), clock, pace)
    run(service, clock, batches, 60)
    found = known(service.curve_fit)
    for batch in set(batches):
        assert found.predict_step_s(batch, 30) == pytest.approx(
            pace.compute_step_s(batch, 1, 0), rel=0.05
        )
    curve = service.stats().curve
    assert curve is not None and curve[:6] == found.encode()


@pytest.mark.rotating(2)
def test_a_paced_engine_beyond_its_plateau_is_found_to_take_longer_for_each_sequence() -> None:
    clock, pace = StandingClock(), EmulatedEngineSpeed(0.01, 1, 1000.0)
    service = serving(built_in("eager", 8, 256, clock=clock), clock, pace)
    run(service, clock, [2, 8, 4, 6] * 3, 60)
    found = known(service.curve_fit)
    for batch in (2, 4, 8):
        assert found.predict_step_s(batch, 30) == pytest.approx(0.01 * batch, rel=0.1)


def test_a_simulated_engine_is_found_to_keep_the_rate_that_it_declares() -> None:
    clock = StandingClock()
    service = serving(SimulatedEngine(clock, 8, 50.0, max_length=4096, version=0), clock)
    run(service, clock, [1, 8, 3, 5] * 3, 100)
    found = known(service.curve_fit)
    for batch in (1, 8):
        assert found.predict_step_s(batch, 100) == pytest.approx(1 / 50, rel=0.1)


def test_load_and_contexts_are_those_of_what_runs_and_waits() -> None:
    clock = StandingClock()
    service = serving(SimulatedEngine(clock, 2, 10.0, max_length=4096, version=0), clock)
    service.admit([request(i, range(1, 21), max_new=30) for i in range(3)], [])
    assert service.context_lengths.mean_tokens == 20
    service.run_once()
    clock.pass_(2.0)
    service.run_once()
    assert service.stats().running_s == pytest.approx(4.0)
    assert service.stats().waiting_s == pytest.approx(2.0)
    assert service.stats().context == pytest.approx((40 + 40 + 20) / 3, abs=0.1)
    clock.pass_(50.0)
    service.run_once()
    assert (service.context_lengths.mean_tokens, service.context_lengths.total_tokens) == (0, 0)


def test_time_that_others_take_from_short_steps_counts_in_the_mean() -> None:
    random, fit, took_s = np.random.default_rng(0), CurveFit(), 0.0
    for _ in range(20_000):
        step_s = 40e-6 + (2e-3 if random.random() < 0.05 else 0.0)
        fit.add_steps(1, 8, 8 * 40.0, 0, step_s)
        took_s += step_s
    assert known(fit).predict_step_s(8, 40) == pytest.approx(took_s / 20_000, rel=0.1)


def measured(plateau: int, sizes: range) -> Throughput:
    """Of an engine whose steps take 10 ms up to `plateau` sequences, and in proportion beyond."""
    table = Throughput()
    for batch in sizes:
        for _ in range(20):
            table.add_steps(batch, batch, 0.01 * max(1.0, batch / plateau))
    return table


@given(st.integers(2, 40))
def test_the_plateau_of_a_flat_curve_is_found_from_what_ran(plateau: int) -> None:
    found = measured(plateau, range(1, 4 * plateau)).plateau_batch
    assert 0.6 * plateau <= found <= 1.5 * plateau


def test_there_is_no_plateau_before_throughput_was_seen_to_stay() -> None:
    assert Throughput().plateau_batch == 0
    assert measured(64, range(1, 40)).plateau_batch == 0
    assert measured(64, range(8, 9)).plateau_batch == 0


def test_a_size_seen_once_or_without_tokens_says_nothing() -> None:
    table = Throughput()
    table.add_steps(4, 4, 0.01)
    table.add_steps(0, 0, 0.01)
    table.add_steps(4, 0, 0.01)
    assert table.tokens_per_s_by_batch == {}


@given(st.integers(1, 10_000))
def test_size_classes_are_at_most_a_third_below(batch: int) -> None:
    size = size_class(batch)
    assert size <= batch < 1.5 * size + 1


def test_a_table_by_batch_and_context_has_what_was_seen_often_enough() -> None:
    table = Throughput()
    for _ in range(7):
        for context, rate in ((10.0, 400.0), (700.0, 200.0), (800.0, 200.0)):
            table.add_steps(4, 4, 4 / rate, context)
    assert table.tokens_per_s_by_context == {"4x512": 200.0}
    table.add_steps(5, 5, 5 / 400.0, 12.0)
    assert table.tokens_per_s_by_context == {"4x0": 400.0, "4x512": 200.0}
    assert [context_class(n) for n in (0, 31, 32, 63, 64, 1000.5)] == [0, 0, 32, 32, 64, 512]


PACE = EmulatedEngineSpeed(decode_step_s=0.01, plateau_batch=2, prefill_tokens_per_s=1000.0)


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
        flush = steps.drain_outputs()
        if flush is not None:
            for id, finish in zip(flush.ids.tolist(), flush.finish_reasons.tolist(), strict=True):
                if finish:
                    ends[id] = clock.monotonic() - began
        clock.pass_(max(steps.next_step_delay_s, 1e-6))
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
    assert steps.drain_outputs() is None and not steps.has_finished
    clock.pass_(0.009)
    assert steps.step() and steps.drain_outputs() is None
    clock.pass_(0.0011)
    assert steps.step()
    flush = steps.drain_outputs()
    assert flush is not None and flush.counts.tolist() == [1]


def test_it_generates_what_the_engine_inside_would() -> None:
    engine, steps, clock = paced()
    ours = Listener(engine, lambda: clock.pass_(0.05), steps)
    ours.run(*(request(i, (1, 2, i + 1), max_new=12) for i in range(6)))
    plain = Listener(built_in("eager", 4, 256))
    plain.run(*(request(i, (1, 2, i + 1), max_new=12) for i in range(6)))
    for i in range(6):
        assert ours.heard[i].tokens == plain.heard[i].tokens
        assert ours.heard[i].finish == [FinishReason.LENGTH]


def test_an_abort_brings_what_was_there_and_nothing_later() -> None:
    engine, steps, clock = paced()
    listener = Listener(engine, lambda: clock.pass_(0.05), steps)
    engine.submit([request(1, (1,), max_new=50), request(2, (1,), max_new=3)])
    for _ in range(3):
        steps.step()
        listener.advance()
    engine.abort([1])
    listener.run()
    assert listener.heard[1].finish == [FinishReason.ABORTED]
    assert 1 <= len(listener.heard[1].tokens) <= 4
    assert len(listener.heard[2].tokens) == 3


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 5000))
def test_a_larger_batch_never_takes_less_and_never_brings_fewer_tokens_a_second(
    batch: int, steps: int, prefilled: int
) -> None:
    pace = ENGINE_PROFILES["a100-7b"]
    now, more = (
        pace.compute_step_s(batch, steps, prefilled),
        pace.compute_step_s(batch + 1, steps, prefilled),
    )
    assert more >= now
    assert (batch + 1) / pace.compute_step_s(batch + 1, 1, 0) >= batch / pace.compute_step_s(
        batch, 1, 0
    ) * 0.999


def test_a_pace_of_a_higher_degree_reads_a_part_of_the_weights_and_gathers() -> None:
    one = ENGINE_PROFILES["a100-7b"]
    four = one.with_tensor_parallel(4)
    gathers_s = 2 * 28 * 8e-6
    assert four.compute_step_s(1, 1, 0) == pytest.approx(one.decode_step_s / 4 + gathers_s)
    assert four.compute_step_s(0, 0, 1024) == pytest.approx(
        one.compute_step_s(0, 0, 1024) / 4 + gathers_s
    )
    assert one.with_tensor_parallel(1) == one
    declared = parse_engine_speed("20/32/6000").with_tensor_parallel(2)
    assert declared.compute_step_s(1, 1, 0) == pytest.approx(0.020 / 2 + 0.05 * 0.020)


@given(st.integers(1, 300), st.sampled_from([2, 4, 8]))
def test_a_higher_degree_answers_sooner_and_gives_less_per_worker(batch: int, degree: int) -> None:
    one, more = ENGINE_PROFILES["a100-7b"], ENGINE_PROFILES["a100-7b"].with_tensor_parallel(degree)
    assert (
        one.compute_step_s(batch, 1, 0) / degree
        < more.compute_step_s(batch, 1, 0)
        < one.compute_step_s(batch, 1, 0)
    )


def test_an_engine_of_two_workers_has_the_pace_of_two_and_says_so() -> None:
    clock = StandingClock()
    pace = parse_engine_speed("20/4/1000")
    engine = built_in("eager", 4, 256, clock=clock)
    steps = EmulatedSteps(engine, pace, clock, 2)
    assert steps.tensor_parallel_size == 2
    engine.submit([request(1, (1,), max_new=30)])
    ends = finished_at(steps, clock, [1])
    assert ends[1] == pytest.approx(30 * (0.010 + 0.001), rel=0.1)


def test_a_profile_is_a_name_or_three_numbers() -> None:
    assert parse_engine_speed("18/32/6000") == EmulatedEngineSpeed(0.018, 32, 6000.0)
    assert parse_engine_speed("h100-7b").decode_step_s == pytest.approx(
        2 * 7.6e9 / (3.35e12 * 0.85)
    )
    for wrong in ("tpu", "18/32", "0/32/6000", "18/x/6000", ""):
        with pytest.raises(ConfigError, match="there is no pace"):
            parse_engine_speed(wrong)


def test_steps_that_end_late_are_counted_and_waiting_for_a_turn_is_none() -> None:
    engine, steps, clock = paced()
    engine.submit([request(1, (1,), max_new=10)])
    for pause_s in (0.01, 0.0105, 0.02):  # of 10 ms each: in time, within a tenth, late
        steps.reset_lateness()
        steps.step()
        clock.pass_(pause_s)
        steps.drain_outputs()
        clock.pass_(5.0)  # others compute
    assert (steps.emulated_count, steps.late_count) == (3, 1)
    began = clock.monotonic()
    steps.reset_lateness()
    steps.step()
    assert steps.next_step_delay_s == pytest.approx(0.01)  # nothing is made up for
    assert clock.monotonic() == began
