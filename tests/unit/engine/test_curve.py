"""Speed of an engine: decode curve, throughput, and emulation of a declared speed."""

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
    ManualClock,
    built_in,
    request,
)

TRUTH = DecodeCurve("cpu", 1, 0.02, 5e-4, 2e-7, 6000.0)
PLACES = [(batch, context) for batch in (1, 4, 12, 32) for context in (50, 400, 2000)]


def fit_curve(truth: DecodeCurve, noise: float, steps: int = 3000, seed: int = 0) -> CurveFit:
    """Fit steps with drifting batches and contexts, some of which also compute prompts."""
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
    fitted = fit.get_curve("cpu", 1)
    assert fitted is not None
    return fitted


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_curve_is_recovered_within_5_percent(noise: float, seed: int) -> None:
    fitted = known(fit_curve(TRUTH, noise, seed=seed))
    for batch, context in PLACES:
        assert fitted.predict_step_s(batch, context) == pytest.approx(
            TRUTH.predict_step_s(batch, context), rel=0.05
        ), (batch, context)
    assert fitted.prefill_tokens_per_s == pytest.approx(6000.0, rel=0.05)
    assert fitted.fitted_steps == 3000


@pytest.mark.parametrize("truth", [DecodeCurve("cpu", 1, 0.03), DecodeCurve("cpu", 1, 0.0, 1e-3)])
def test_absent_terms_are_zero_and_no_term_is_negative(truth: DecodeCurve) -> None:
    fitted = known(fit_curve(DecodeCurve("cpu", 1, truth.base_s, truth.sequence_s, 0.0, 1e9), 0.2))
    assert min(fitted.base_s, fitted.sequence_s, fitted.context_s) >= 0
    for batch, context in PLACES[3:]:
        assert fitted.predict_step_s(batch, context) == pytest.approx(
            truth.predict_step_s(batch, context), rel=0.2
        ), (batch, context)


def test_single_batch_size_gives_its_step_time_as_mostly_constant() -> None:
    fit = CurveFit()
    for _ in range(400):
        fit.add_steps(1, 8, 8 * 100.0, 0, 0.02)
    fitted = known(fit)
    assert fitted.predict_step_s(8, 100) == pytest.approx(0.02, rel=0.01)
    assert 0.7 < fitted.base_s / 0.02 < 0.9


def test_slowdown_of_the_machine_is_detected_within_seconds() -> None:
    fit = fit_curve(TRUTH, 0.05)
    for _ in range(500):
        fit.add_steps(1, 8, 8 * 300.0, 0, 2 * TRUTH.predict_step_s(8, 300))
    fitted = known(fit)
    assert fitted.predict_step_s(8, 300) == pytest.approx(
        2 * TRUTH.predict_step_s(8, 300), rel=0.06
    )


def test_stalled_step_is_left_out_of_the_curve() -> None:
    fit = fit_curve(TRUTH, 0.05)
    before = known(fit).predict_step_s(8, 300)
    for n in range(4 * WINDOW_STEPS):
        fit.add_steps(1, 8, 8 * 300.0, 0, TRUTH.predict_step_s(8, 300) + 60.0 * (n == 0))
    assert known(fit).predict_step_s(8, 300) < 1.5 * before


def test_curve_requires_several_windows_with_decode_steps() -> None:
    fit = CurveFit()
    assert fit.get_curve("cpu", 1) is None
    for _ in range(3 * WINDOW_STEPS):
        fit.add_steps(1, 2, 20.0, 0, 0.01)
    assert fit.get_curve("cpu", 1) is None
    prompts = CurveFit()
    for _ in range(100):
        prompts.add_steps(1, 0, 0.0, 512, 0.1)
    assert prompts.get_curve("cpu", 1) is None


def create_service(
    engine: TokenEngine, clock: ManualClock, speed: EmulatedEngineSpeed | None = None
) -> EngineService:
    mesh = alone("engine/g0", clock, Random(0), SimulatedHost(clock, Random(0)))
    emulated = EmulatedSteps(engine, speed, clock) if speed is not None else None
    return EngineService(mesh, engine, lambda action: action(), emulation=emulated)


def run(service: EngineService, clock: ManualClock, batches: list[int], tokens: int) -> None:
    """Run one batch after the other, each to its end."""
    number = 0
    for batch in batches:
        requests = [request(number + i, (1, 2, 3, 4), max_new=tokens) for i in range(batch)]
        number += batch
        service.admit(requests, [])
        while service.engine.num_running or service.engine.num_waiting:
            service.run_once()
            clock.advance(max(service.steps.next_step_delay_s, 1e-6))


@pytest.mark.parametrize("batches", [[1, 4, 2, 3] * 2, [4, 4]])
def test_emulated_engine_below_its_plateau_has_its_declared_speed(batches: list[int]) -> None:
    clock, speed = ManualClock(), EmulatedEngineSpeed(0.01, 4, 1000.0)
    service = create_service(built_in("eager", 8, 256, clock=clock), clock, speed)
    run(service, clock, batches, 40)
    fitted = known(service.curve_fit)
    for batch in set(batches):
        assert fitted.predict_step_s(batch, 30) == pytest.approx(
            speed.compute_step_s(batch, 1, 0), rel=0.05
        )
    curve = service.stats().decode_curve
    assert curve is not None and curve[:6] == fitted.encode()


@pytest.mark.rotating(2)
def test_emulated_engine_above_its_plateau_slows_with_each_sequence() -> None:
    clock, speed = ManualClock(), EmulatedEngineSpeed(0.01, 1, 1000.0)
    service = create_service(built_in("eager", 8, 256, clock=clock), clock, speed)
    run(service, clock, [2, 8, 4, 6] * 2, 60)
    fitted = known(service.curve_fit)
    for batch in (2, 4, 8):
        assert fitted.predict_step_s(batch, 30) == pytest.approx(0.01 * batch, rel=0.1)


def test_simulated_engine_has_its_declared_rate() -> None:
    clock = ManualClock()
    service = create_service(SimulatedEngine(clock, 8, 50.0, max_length=4096, version=0), clock)
    run(service, clock, [1, 8, 3, 5] * 3, 100)
    fitted = known(service.curve_fit)
    for batch in (1, 8):
        assert fitted.predict_step_s(batch, 100) == pytest.approx(1 / 50, rel=0.1)


def test_load_and_contexts_cover_running_and_waiting_requests() -> None:
    clock = ManualClock()
    service = create_service(SimulatedEngine(clock, 2, 10.0, max_length=4096, version=0), clock)
    service.admit([request(i, range(1, 21), max_new=30) for i in range(3)], [])
    assert service.context_lengths.mean_tokens == 20
    service.run_once()
    clock.advance(2.0)
    service.run_once()
    assert service.stats().running_s == pytest.approx(4.0)
    assert service.stats().waiting_s == pytest.approx(2.0)
    assert service.stats().context == pytest.approx((40 + 40 + 20) / 3, abs=0.1)
    clock.advance(50.0)
    service.run_once()
    assert (service.context_lengths.mean_tokens, service.context_lengths.total_tokens) == (0, 0)


def test_mean_step_time_includes_preemption_of_short_steps() -> None:
    random, fit, took_s = np.random.default_rng(0), CurveFit(), 0.0
    for _ in range(20_000):
        step_s = 40e-6 + (2e-3 if random.random() < 0.05 else 0.0)
        fit.add_steps(1, 8, 8 * 40.0, 0, step_s)
        took_s += step_s
    assert known(fit).predict_step_s(8, 40) == pytest.approx(took_s / 20_000, rel=0.1)


def measure_throughput(plateau: int, sizes: range) -> Throughput:
    """Return the throughput of steps that take 10 ms up to `plateau` sequences and grow linearly
    beyond.
    """
    table = Throughput()
    for batch in sizes:
        for _ in range(20):
            table.add_steps(batch, batch, 0.01 * max(1.0, batch / plateau))
    return table


@given(st.integers(2, 40))
def test_plateau_is_found_from_measured_batches(plateau: int) -> None:
    fitted = measure_throughput(plateau, range(1, 4 * plateau)).plateau_batch
    assert 0.6 * plateau <= fitted <= 1.5 * plateau


def test_plateau_requires_a_measured_flat_range() -> None:
    assert Throughput().plateau_batch == 0
    assert measure_throughput(64, range(1, 40)).plateau_batch == 0
    assert measure_throughput(64, range(8, 9)).plateau_batch == 0


def test_batch_size_measured_once_or_without_tokens_is_ignored() -> None:
    table = Throughput()
    table.add_steps(4, 4, 0.01)
    table.add_steps(0, 0, 0.01)
    table.add_steps(4, 0, 0.01)
    assert table.tokens_per_s_by_batch == {}


@given(st.integers(1, 10_000))
def test_size_class_is_at_most_a_third_below_the_batch(batch: int) -> None:
    size = size_class(batch)
    assert size <= batch < 1.5 * size + 1


def test_table_by_batch_and_context_contains_frequent_classes() -> None:
    table = Throughput()
    for _ in range(7):
        for context, rate in ((10.0, 400.0), (700.0, 200.0), (800.0, 200.0)):
            table.add_steps(4, 4, 4 / rate, context)
    assert table.tokens_per_s_by_context == {"4x512": 200.0}
    table.add_steps(5, 5, 5 / 400.0, 12.0)
    assert table.tokens_per_s_by_context == {"4x0": 400.0, "4x512": 200.0}
    assert [context_class(n) for n in (0, 31, 32, 63, 64, 1000.5)] == [0, 0, 32, 32, 64, 512]


SPEED = EmulatedEngineSpeed(decode_step_s=0.01, plateau_batch=2, prefill_tokens_per_s=1000.0)


def create_emulated_engine(slots: int = 4) -> tuple[TokenEngine, EmulatedSteps, ManualClock]:
    clock = ManualClock()
    engine = built_in("eager", slots, 256, clock=clock)
    return engine, EmulatedSteps(engine, SPEED, clock), clock


def run_until_finished(
    steps: EmulatedSteps, clock: ManualClock, ids: list[int]
) -> dict[int, float]:
    """Return the seconds at which each request ended, stepping whenever a step is due."""
    began = clock.monotonic()
    ends: dict[int, float] = {}
    while len(ends) < len(ids):
        steps.step()
        flush = steps.drain_outputs()
        if flush is not None:
            for id, finish in zip(flush.ids.tolist(), flush.finish_reasons.tolist(), strict=True):
                if finish:
                    ends[id] = clock.monotonic() - began
        clock.advance(max(steps.next_step_delay_s, 1e-6))
        assert clock.monotonic() - began < 60
    return ends


@pytest.mark.parametrize(
    ("batch", "tokens", "step_s"), [(1, 30, 0.01), (2, 30, 0.01), (4, 30, 0.02)]
)
def test_decode_time_is_flat_up_to_the_plateau_and_linear_beyond(
    batch: int, tokens: int, step_s: float
) -> None:
    engine, steps, clock = create_emulated_engine()
    engine.submit([request(i, (1,), max_new=tokens) for i in range(batch)])
    ends = run_until_finished(steps, clock, list(range(batch)))
    assert list(ends.values()) == pytest.approx([tokens * step_s] * batch, rel=0.1)


def test_prompt_tokens_take_prefill_time() -> None:
    engine, steps, clock = create_emulated_engine()
    engine.submit([request(1, range(1, 39), max_new=2)])
    first = run_until_finished(steps, clock, [1])[1]
    assert first == pytest.approx(37 / 1000 + 2 * 0.01, rel=0.1)


def test_session_takes_time_only_for_new_tokens() -> None:
    engine, steps, clock = create_emulated_engine()
    engine.submit([request(1, range(1, 39), max_new=2, session=7)])
    run_until_finished(steps, clock, [1])
    engine.submit([request(2, [*range(1, 39), 3], max_new=2, session=7)])
    assert run_until_finished(steps, clock, [2])[2] < 0.03


def test_tokens_appear_when_their_emulated_step_ends() -> None:
    engine, steps, clock = create_emulated_engine()
    engine.submit([request(1, (1,), max_new=5)])
    assert steps.step()
    assert steps.drain_outputs() is None and not steps.has_finished
    clock.advance(0.009)
    assert steps.step() and steps.drain_outputs() is None
    clock.advance(0.0011)
    assert steps.step()
    flush = steps.drain_outputs()
    assert flush is not None and flush.counts.tolist() == [1]


def test_emulated_engine_generates_equal_tokens() -> None:
    engine, steps, clock = create_emulated_engine()
    emulated_listener = Listener(engine, lambda: clock.advance(0.05), steps)
    emulated_listener.run(*(request(i, (1, 2, i + 1), max_new=12) for i in range(6)))
    plain_listener = Listener(built_in("eager", 4, 256))
    plain_listener.run(*(request(i, (1, 2, i + 1), max_new=12) for i in range(6)))
    for i in range(6):
        assert emulated_listener.outputs[i].tokens == plain_listener.outputs[i].tokens
        assert emulated_listener.outputs[i].finish == [FinishReason.LENGTH]


def test_abort_delivers_only_tokens_generated_before_it() -> None:
    engine, steps, clock = create_emulated_engine()
    listener = Listener(engine, lambda: clock.advance(0.05), steps)
    engine.submit([request(1, (1,), max_new=50), request(2, (1,), max_new=3)])
    for _ in range(3):
        steps.step()
        listener.advance()
    engine.abort([1])
    listener.run()
    assert listener.outputs[1].finish == [FinishReason.ABORTED]
    assert 1 <= len(listener.outputs[1].tokens) <= 4
    assert len(listener.outputs[2].tokens) == 3


@given(st.integers(1, 200), st.integers(1, 8), st.integers(0, 5000))
def test_larger_batch_is_never_faster_per_step_nor_slower_per_token(
    batch: int, steps: int, prefilled: int
) -> None:
    speed = ENGINE_PROFILES["a100-7b"]
    now, larger = (
        speed.compute_step_s(batch, steps, prefilled),
        speed.compute_step_s(batch + 1, steps, prefilled),
    )
    assert larger >= now
    assert (batch + 1) / speed.compute_step_s(batch + 1, 1, 0) >= batch / speed.compute_step_s(
        batch, 1, 0
    ) * 0.999


def test_tensor_parallel_speed_reads_part_of_the_weights_and_gathers() -> None:
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
def test_tensor_parallelism_lowers_latency_and_throughput_per_worker(
    batch: int, degree: int
) -> None:
    one, larger = (
        ENGINE_PROFILES["a100-7b"],
        ENGINE_PROFILES["a100-7b"].with_tensor_parallel(degree),
    )
    assert (
        one.compute_step_s(batch, 1, 0) / degree
        < larger.compute_step_s(batch, 1, 0)
        < one.compute_step_s(batch, 1, 0)
    )


def test_engine_of_two_workers_has_the_speed_of_two() -> None:
    clock = ManualClock()
    speed = parse_engine_speed("20/4/1000")
    engine = built_in("eager", 4, 256, clock=clock)
    steps = EmulatedSteps(engine, speed, clock, 2)
    assert steps.tensor_parallel_size == 2
    engine.submit([request(1, (1,), max_new=30)])
    ends = run_until_finished(steps, clock, [1])
    assert ends[1] == pytest.approx(30 * (0.010 + 0.001), rel=0.1)


def test_speed_is_a_profile_name_or_three_numbers() -> None:
    assert parse_engine_speed("18/32/6000") == EmulatedEngineSpeed(0.018, 32, 6000.0)
    assert parse_engine_speed("h100-7b").decode_step_s == pytest.approx(
        2 * 7.6e9 / (3.35e12 * 0.85)
    )
    for invalid in ("tpu", "18/32", "0/32/6000", "18/x/6000", ""):
        with pytest.raises(ConfigError, match="there is no emulated"):
            parse_engine_speed(invalid)


def test_late_steps_are_counted_without_waits_for_a_slice() -> None:
    engine, steps, clock = create_emulated_engine()
    engine.submit([request(1, (1,), max_new=10)])
    for pause_s in (0.01, 0.0105, 0.02):  # of steps of 10 ms: in time, within a tenth, late
        steps.reset_lateness()
        steps.step()
        clock.advance(pause_s)
        steps.drain_outputs()
        clock.advance(5.0)  # other processes compute
    assert (steps.emulated_count, steps.late_count) == (3, 1)
    began = clock.monotonic()
    steps.reset_lateness()
    steps.step()
    assert steps.next_step_delay_s == pytest.approx(0.01)  # lateness is not compensated
    assert clock.monotonic() == began
