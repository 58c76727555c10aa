"""Too little memory, sleep, and large batches cost time, never a token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.generation.batch.blocks import BLOCK
from tests.unit.common.generation.engines_under_test import (
    TINY,
    Listener,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_torch_engine import Make, holds, make, words

__all__ = ["make"]


@pytest.mark.needs("compiler")
def test_requests_that_do_not_fit_together_give_way_and_are_computed_again() -> None:
    contexts = {i: words(i, 20 + 5 * i) for i in range(8)}
    asked = [request(i, context, max_new=60) for i, context in contexts.items()]
    roomy = Listener(built_in("native", slots=8)).run(*asked)
    engine = built_in("native", slots=8, kv_tokens=14 * BLOCK)
    tight = Listener(engine).run(*asked)
    assert engine.preempted > 0
    for i, context in contexts.items():
        assert tight[i].tokens == roomy[i].tokens
        holds(tight[i], decoder(), context)


@pytest.mark.needs("compiler")
def test_under_pressure_the_oldest_request_ends_first() -> None:
    engine = built_in("native", slots=4, kv_tokens=9 * BLOCK)
    listener = Listener(engine)
    engine.submit([request(i, words(i, 40), max_new=80) for i in range(4)])
    order: list[int] = []
    while engine.step():
        listener.drain()
        order += [i for i, h in listener.heard.items() if h.finish and i not in order]
    assert order == [0, 1, 2, 3]


@pytest.mark.rotating(3)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("seed", range(12))
def test_whatever_shares_and_gives_way_every_token_is_right(seed: int) -> None:
    """Groups with few distinct prompts and equal seeds: blocks are shared, doubled and taken."""
    random = np.random.default_rng(seed)
    engine = built_in("native", slots=6, kv_tokens=(10 + seed) * BLOCK, steps=8, budget_s=60.0)
    listener = Listener(engine)
    contexts: dict[int, list[int]] = {}
    for id in range(24):
        contexts[id] = words(int(random.integers(3)), int(random.choice([5, 16, 33, 50])))
        engine.submit(
            [
                request(
                    id,
                    contexts[id],
                    max_new=int(random.integers(1, 70)),
                    seed=int(random.integers(3)),
                    temperature=float(random.choice([0.0, 1.0])),
                    session=int(random.integers(-1, 4)),
                )
            ]
        )
        for _ in range(int(random.integers(4))):
            engine.step()
    for id, heard in listener.run().items():
        holds(heard, decoder(), contexts[id])


@pytest.mark.needs("compiler")
def test_idle_sessions_give_way_before_requests_do() -> None:
    engine = built_in("native", slots=4, kv_tokens=9 * BLOCK)
    listener = Listener(engine)
    context = words(1, 60)
    first = listener.run(request(1, context, session=5, max_new=4))[1].tokens
    listener.run(request(2, words(2, 60), max_new=60))
    assert engine.preempted == 0
    heard = listener.run(request(3, [*context, *first, 7], session=5, max_new=4))[3]
    holds(heard, decoder(), [*context, *first, 7])


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("steps", [1, 8])
def test_several_steps_in_a_call_give_the_same_tokens(steps: int) -> None:
    asked = [request(i, words(i, 7), max_new=5 + 3 * i, stop_ids=(3, 9)) for i in range(9)]
    one = Listener(built_in("native")).run(*asked)
    many = Listener(built_in("native", steps=steps, budget_s=60.0)).run(*asked)
    assert {i: h.tokens for i, h in one.items()} == {i: h.tokens for i, h in many.items()}
    assert {i: h.finish for i, h in one.items()} == {i: h.finish for i, h in many.items()}


def test_sleep_loses_no_token_and_waking_goes_on(make: Make) -> None:
    whole = Listener(make()).run(request(1, [4, 5], max_new=30, seed=3))[1].tokens
    engine = make()
    listener = Listener(engine)
    engine.submit([request(1, [4, 5], max_new=30, seed=3), *(request(i) for i in range(2, 9))])
    while engine.tokens_generated < 20:
        engine.step()
    engine.sleep()
    assert not engine.step()
    with pytest.raises(Refused, match="no weights"):
        engine.score(np.array([1, 2]))
    engine.wake(decoder().state_dict(), 1)
    heard = listener.run()
    assert heard[1].tokens == whole
    assert heard[1].versions == sorted(heard[1].versions) and heard[1].versions[-1] == 1
    assert all(len(heard[i].tokens) == 20 for i in range(2, 9))


def test_an_engine_without_weights_waits_for_them(make: Make) -> None:
    engine = make()
    engine.sleep()
    engine.submit([request(1)])
    assert not engine.step() and engine.waiting == 1
    engine.wake(decoder(1).state_dict(), 7)
    assert Listener(engine).run()[1].versions == [7] * 20


@pytest.mark.needs("compiler")
def test_scoring_makes_room_and_what_gave_way_goes_on() -> None:
    engine = built_in("native", slots=4, kv_tokens=9 * BLOCK)
    engine.submit([request(i, words(i, 30), max_new=60) for i in range(4)])
    for _ in range(4):
        engine.step()
    scored = engine.score(np.array(words(9, 120)))
    assert scored.shape == (119,)
    heard = Listener(engine).run()
    for i in range(4):
        assert len(heard[i].tokens) == 60
        holds(heard[i], decoder(), words(i, 30))


def test_a_sequence_too_long_to_score_is_refused(make: Make) -> None:
    with pytest.raises(Refused, match="129 tokens"):
        make(max_length=128).score(np.array(words(1, 129)))


@pytest.mark.parametrize("odd", [{"path": "fast"}, {"dtype": "float16"}])
def test_an_unknown_path_or_type_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is no path"):
        built_in(**{"path": "auto", **odd})


@pytest.mark.needs("compiler")
def test_bfloat16_stays_near_float32() -> None:
    heard = Listener(built_in("native", dtype="bfloat16")).run(request(1, [4, 5], max_new=30))[1]
    scored = built_in("native").score(np.array([4, 5, *heard.tokens]))[1:]
    assert np.abs(np.array(heard.logprobs) - scored).max() < 0.25
    assert TINY.head_dim not in (32, 64, 128)  # heads are padded to a width that has kernels
