"""What a decode step takes is learned from steps, and engines at a pace are found to keep it."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.common.base.random import Random
from meshrl.common.generation.contract import TokenEngine
from meshrl.common.job.pace import Pace
from meshrl.common.state.pool.demand.measured import Curve
from meshrl.services.engine.measurement.curve import WINDOW_STEPS, CurveFit
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.sim.engines.simulated import SimulatedEngine
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.common.generation.engines_under_test import StandingClock, built_in, request

TRUTH = Curve("cpu", 1, 0.02, 5e-4, 2e-7, 6000.0)
PLACES = [(batch, context) for batch in (1, 4, 12, 32) for context in (50, 400, 2000)]


def fitted(truth: Curve, noise: float, steps: int = 3000, seed: int = 0) -> CurveFit:
    """From steps whose batches and contexts drift, some of which compute prompts beside."""
    random, fit = np.random.default_rng(seed), CurveFit()
    for step in range(steps):
        batch = int(random.integers(1, 33))
        context = 100 + 1000 * step / steps * random.random()
        prompt = int(random.integers(0, 500)) if random.random() < 0.1 else 0
        took_s = truth.step_s(batch, context) + prompt / truth.prefill_tokens_per_s
        took_s *= float(np.exp(noise * random.normal() - noise**2 / 2))
        fit.stepped(1, batch, batch * context, prompt, took_s)
    return fit


def known(fit: CurveFit) -> Curve:
    found = fit.curve("cpu", 1)
    assert found is not None
    return found


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_a_curve_is_recovered_within_a_twentieth(noise: float, seed: int) -> None:
    found = known(fitted(TRUTH, noise, seed=seed))
    for batch, context in PLACES:
        assert found.step_s(batch, context) == pytest.approx(
            TRUTH.step_s(batch, context), rel=0.05
        ), (batch, context)
    assert found.prefill_tokens_per_s == pytest.approx(6000.0, rel=0.05)
    assert found.steps == 3000


@pytest.mark.parametrize("truth", [Curve("cpu", 1, 0.03), Curve("cpu", 1, 0.0, 1e-3)])
def test_a_term_that_is_not_there_is_none_and_none_is_negative(truth: Curve) -> None:
    found = known(fitted(Curve("cpu", 1, truth.base_s, truth.sequence_s, 0.0, 1e9), 0.2))
    assert min(found.base_s, found.sequence_s, found.context_s) >= 0
    for batch, context in PLACES[3:]:
        assert found.step_s(batch, context) == pytest.approx(
            truth.step_s(batch, context), rel=0.2
        ), (batch, context)


def test_one_batch_size_alone_says_its_own_step_and_that_most_of_it_is_for_any_size() -> None:
    fit = CurveFit()
    for _ in range(400):
        fit.stepped(1, 8, 8 * 100.0, 0, 0.02)
    found = known(fit)
    assert found.step_s(8, 100) == pytest.approx(0.02, rel=0.01)
    assert 0.7 < found.base_s / 0.02 < 0.9


def test_a_machine_that_becomes_slower_is_seen_within_seconds() -> None:
    fit = fitted(TRUTH, 0.05)
    for _ in range(500):
        fit.stepped(1, 8, 8 * 300.0, 0, 2 * TRUTH.step_s(8, 300))
    found = known(fit)
    assert found.step_s(8, 300) == pytest.approx(2 * TRUTH.step_s(8, 300), rel=0.06)


def test_a_step_that_stood_for_long_does_not_count_for_what_it_took() -> None:
    fit = fitted(TRUTH, 0.05)
    before = known(fit).step_s(8, 300)
    for n in range(4 * WINDOW_STEPS):
        fit.stepped(1, 8, 8 * 300.0, 0, TRUTH.step_s(8, 300) + 60.0 * (n == 0))
    assert known(fit).step_s(8, 300) < 1.5 * before


def test_there_is_no_curve_before_a_few_windows_nor_of_prompts_alone() -> None:
    fit = CurveFit()
    assert fit.curve("cpu", 1) is None
    for _ in range(3 * WINDOW_STEPS):
        fit.stepped(1, 2, 20.0, 0, 0.01)
    assert fit.curve("cpu", 1) is None
    prompts = CurveFit()
    for _ in range(100):
        prompts.stepped(1, 0, 0.0, 512, 0.1)
    assert prompts.curve("cpu", 1) is None


def serving(engine: TokenEngine, clock: StandingClock, pace: Pace | None = None) -> EngineService:
    mesh = alone("engine/g0", clock, Random(0), SimulatedHost(clock, Random(0)))
    emulated = EmulatedSteps(engine, pace, clock) if pace is not None else None
    return EngineService(mesh, engine, lambda action: action(), emulated=emulated)


def run(service: EngineService, clock: StandingClock, batches: list[int], tokens: int) -> None:
    """One batch after the other, to the end of each."""
    number = 0
    for batch in batches:
        asked = [request(number + i, (1, 2, 3, 4), max_new=tokens) for i in range(batch)]
        number += batch
        service.admit(asked, [])
        while service.engine.running or service.engine.waiting:
            service.turn()
            clock.pass_(max(service.steps.due_s, 1e-6))


@pytest.mark.parametrize("batches", [[1, 4, 2, 3] * 3, [4, 4, 4]])
def test_a_paced_engine_below_its_plateau_is_found_to_keep_its_pace(batches: list[int]) -> None:
    clock, pace = StandingClock(), Pace(0.01, 4, 1000.0)
    service = serving(built_in("eager", 8, 256, clock=clock), clock, pace)
    run(service, clock, batches, 60)
    found = known(service.fit)
    for batch in set(batches):
        assert found.step_s(batch, 30) == pytest.approx(pace.step_s(batch, 1, 0), rel=0.05)
    curve = service.stats().curve
    assert curve is not None and curve[:6] == found.told()


@pytest.mark.rotating(2)
def test_a_paced_engine_beyond_its_plateau_is_found_to_take_longer_for_each_sequence() -> None:
    clock, pace = StandingClock(), Pace(0.01, 1, 1000.0)
    service = serving(built_in("eager", 8, 256, clock=clock), clock, pace)
    run(service, clock, [2, 8, 4, 6] * 3, 60)
    found = known(service.fit)
    for batch in (2, 4, 8):
        assert found.step_s(batch, 30) == pytest.approx(0.01 * batch, rel=0.1)


def test_a_simulated_engine_is_found_to_keep_the_rate_that_it_declares() -> None:
    clock = StandingClock()
    service = serving(SimulatedEngine(clock, 8, 50.0, max_length=4096, version=0), clock)
    run(service, clock, [1, 8, 3, 5] * 3, 100)
    found = known(service.fit)
    for batch in (1, 8):
        assert found.step_s(batch, 100) == pytest.approx(1 / 50, rel=0.1)


def test_load_and_contexts_are_those_of_what_runs_and_waits() -> None:
    clock = StandingClock()
    service = serving(SimulatedEngine(clock, 2, 10.0, max_length=4096, version=0), clock)
    service.admit([request(i, range(1, 21), max_new=30) for i in range(3)], [])
    assert service.contexts.mean == 20
    service.turn()
    clock.pass_(2.0)
    service.turn()
    assert service.stats().running_s == pytest.approx(4.0)
    assert service.stats().waiting_s == pytest.approx(2.0)
    assert service.stats().context == pytest.approx((40 + 40 + 20) / 3, abs=0.1)
    clock.pass_(50.0)
    service.turn()
    assert (service.contexts.mean, service.contexts.tokens) == (0, 0)


def test_time_that_others_take_from_short_steps_counts_in_the_mean() -> None:
    random, fit, took_s = np.random.default_rng(0), CurveFit(), 0.0
    for _ in range(20_000):
        step_s = 40e-6 + (2e-3 if random.random() < 0.05 else 0.0)
        fit.stepped(1, 8, 8 * 40.0, 0, step_s)
        took_s += step_s
    assert known(fit).step_s(8, 40) == pytest.approx(took_s / 20_000, rel=0.1)
