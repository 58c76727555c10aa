"""The simulated engine keeps the time it declares."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.common.api.engine import Finish
from tests.unit.common.generation.engines_under_test import VOCAB, StandingClock, request, simulated


def clock_of(engine: object) -> StandingClock:
    clock = engine._clock  # type: ignore[attr-defined]
    assert isinstance(clock, StandingClock)
    return clock


def test_each_request_runs_at_the_declared_rate_whatever_runs_beside_it() -> None:
    engine, listener = simulated(slots=8, rate=40.0)
    engine.submit([request(i, max_new=1000) for i in range(5)])
    clock_of(engine).pass_(10.0)
    engine.step()
    listener.drain()
    assert [len(h.tokens) for h in listener.heard.values()] == [400] * 5


def test_a_step_is_never_early() -> None:
    engine, _ = simulated(rate=40.0)
    engine.submit([request(1)])
    assert engine.due_s == pytest.approx(0.025)
    clock_of(engine).pass_(0.02)
    assert engine.step() and engine.tokens_generated == 0
    clock_of(engine).pass_(engine.due_s)
    assert engine.step() and engine.tokens_generated == 1


def test_a_slot_that_came_free_between_two_steps_was_used_from_then_on() -> None:
    engine, listener = simulated(slots=1, rate=10.0)
    engine.submit([request(i, max_new=10) for i in range(3)])
    clock_of(engine).pass_(2.5)
    engine.step()
    listener.drain()
    assert [len(listener.heard[i].tokens) for i in range(3)] == [10, 10, 5]
    assert engine.running == 1 and engine.waiting == 0


def test_lengths_are_lognormal_and_end_with_a_stop_token() -> None:
    _, listener = simulated(slots=2000, rate=100.0, lengths=(50.0, 0.7))
    requests = [request(i, max_new=5000, stop_ids=(3,)) for i in range(2000)]
    clock_of(listener.engine).pass_(0)
    listener.engine.submit(requests)
    clock_of(listener.engine).pass_(1000.0)
    heard = listener.run()
    lengths = np.array([len(h.tokens) for h in heard.values()])
    assert np.median(lengths) == pytest.approx(50, rel=0.08)
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.08)
    assert all(
        h.finish == [Finish.STOP] and h.tokens.index(3) == len(h.tokens) - 1 for h in heard.values()
    )


def test_a_length_that_does_not_fit_is_cut() -> None:
    _, listener = simulated(lengths=(100.0, 0.8))
    heard = listener.run(*(request(i, max_new=5, stop_ids=(3,)) for i in range(20)))
    assert all(len(h.tokens) <= 5 for h in heard.values())
    assert sum(h.finish == [Finish.LENGTH] for h in heard.values()) > 15


def test_the_time_of_a_pause_does_not_count() -> None:
    engine, listener = simulated(rate=10.0)
    engine.submit([request(1, max_new=100)])
    clock_of(engine).pass_(1.0)
    engine.pause()
    clock_of(engine).pass_(50.0)
    engine.resume()
    clock_of(engine).pass_(1.0)
    engine.step()
    listener.drain()
    assert len(listener.heard[1].tokens) == 20


def test_the_same_request_resubmitted_later_goes_on_with_the_same_tokens() -> None:
    whole = simulated()[1].run(request(1, [4, 5], max_new=30, seed=6))[1].tokens
    rest = simulated()[1].run(request(2, [4, 5, *whole[:11]], max_new=19, seed=6))[2].tokens
    assert rest == whole[11:]


def test_two_runs_with_one_seed_are_the_same() -> None:
    def run(seed: int) -> list[list[int]]:
        heard = simulated(seed=seed, lengths=(8.0, 0.8))[1].run(
            *(request(i, stop_ids=(1,)) for i in range(9))
        )
        return [h.tokens for h in heard.values()]

    assert run(4) == run(4)
    assert run(4) != run(5)


def test_tokens_of_two_versions_in_one_flush_say_which_is_which() -> None:
    engine, listener = simulated(slots=2, rate=10.0)
    engine.submit([request(1, max_new=6), request(2, max_new=30), request(3, max_new=30)])
    for version in (1, 2):
        clock_of(engine).pass_(0.4)
        engine.swap({}, version)
    clock_of(engine).pass_(0.4)
    engine.step()
    listener.drain()
    assert listener.heard[1].versions == [0] * 4 + [1] * 2
    assert listener.heard[2].versions == [0] * 4 + [1] * 4 + [2] * 4
    assert listener.heard[3].versions == [1] * 2 + [2] * 4, "it took the first one's slot"


def test_no_token_but_the_last_is_a_stop_token_whatever_the_vocabulary() -> None:
    stops = (0, 5, VOCAB - 1)
    _, listener = simulated(lengths=(60.0, 0.8))
    heard = listener.run(*(request(i, max_new=500, stop_ids=stops) for i in range(30)))
    seen = {token for h in heard.values() for token in h.tokens[:-1]}
    assert seen == set(range(VOCAB)) - set(stops)


def test_a_session_leaves_nothing_that_another_engine_could_take() -> None:
    engine, listener = simulated()
    listener.run(request(1, session=3))
    assert engine.cached(3) is None and engine.copied(3, 0, 1) is None
