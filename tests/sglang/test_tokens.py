"""Tokens of a real SGLang: as the engine of ours has them, and over its REST interface."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.engine import SGLangEngine
from tests.sglang import served
from tests.unit.common.generation.engines_under_test import (
    VOCAB,
    Listener,
    built_in,
    decoder,
    request,
    text_of,
)
from tests.unit.common.generation.test_sampling import CONTEXT, kept_by, model_probabilities

PROMPTS = [[1, 2, 3], [4, 39, 6, 7], [0] * 20, list(range(VOCAB))]
ROUNDING = 1e-4  # float32 in another order of summation; 1e-6 as measured


def greedy(listener: Listener, **more: object) -> list[list[int]]:
    asked = [
        request(i, prompt, temperature=0.0, **{"max_new": 40} | more)  # type: ignore[arg-type]
        for i, prompt in enumerate(PROMPTS)
    ]
    heard = listener.run(*asked)
    return [heard[i].tokens for i in range(len(PROMPTS))]


def test_log_probabilities_agree_with_the_built_in_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = Listener(served.engine(8)).run(
        *(request(i, PROMPTS[i % 4], max_new=60) for i in range(24))
    )
    reference = built_in("eager")
    gaps = []
    for i, h in heard.items():
        prompt = PROMPTS[i % 4]
        scored = reference.score(np.array([*prompt, *h.tokens], np.int32))
        gaps.append(np.abs(scored[len(prompt) - 1 :] - np.array(h.logprobs)))
    gap = np.concatenate(gaps)
    figures = {
        "tokens": len(gap),
        "logprob_gap_max": float(gap.max()),
        "logprob_gap_mean": float(gap.mean()),
    }
    with capsys.disabled():
        print(f"\nsglang and built-in engine: {json.dumps(figures)}")
    assert len(gap) == 24 * 60
    assert gap.max() < ROUNDING


def test_greedy_tokens_are_those_of_the_built_in_engine() -> None:
    assert greedy(Listener(served.engine())) == greedy(Listener(built_in("eager")))


def test_a_request_that_is_sent_again_with_its_first_tokens_goes_on_as_it_would_have() -> None:
    whole = Listener(served.engine()).run(request(1, [5, 6], max_new=40, temperature=0.0))[1]
    rest = Listener(served.engine()).run(
        request(1, [5, 6, *whole.tokens[:15]], max_new=25, temperature=0.0, turn_start=2)
    )[1]
    assert rest.tokens == whole.tokens[15:]


def kept_by_sglang(how: dict[str, float], probability: np.ndarray) -> set[int]:
    """Its filters do not follow each other: each looks at the whole distribution."""
    apart = [kept_by({name: how[name]}, probability) for name in how if name != "temperature"]
    return set(range(VOCAB)).intersection(*apart)


@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.2, "temperature": 1.7},
        {"temperature": 0.4},
    ],
    ids=str,
)
def test_log_probabilities_are_of_what_was_sampled_from(how: dict[str, float]) -> None:
    """Beside greedy and plain requests of the same batch, which are of the model itself."""
    asked = [
        request(i, CONTEXT, max_new=1, unmodified=True, **how if i % 3 else {})  # type: ignore[arg-type]
        for i in range(240)
    ]
    asked.append(request(999, CONTEXT, max_new=1, unmodified=True, temperature=0.0))
    heard = Listener(served.engine(48)).run(*asked)
    probability = model_probabilities(CONTEXT, how.get("temperature", 1.0))
    kept = kept_by_sglang(how, probability)
    mass = sum(probability[w] for w in kept)
    plain = np.log(model_probabilities(CONTEXT))
    assert len(heard) == 241
    assert heard[999].tokens == [int(plain.argmax())]
    for i, h in heard.items():
        token = h.tokens[0]
        assert h.unmodified[0] == pytest.approx(plain[token], abs=2e-4)
        if i % 3 and i != 999:
            assert token in kept
            assert h.logprobs[0] == pytest.approx(np.log(probability[token] / mass), abs=2e-4)
        else:
            assert h.logprobs[0] == h.unmodified[0]


def test_a_wide_distribution_that_is_not_the_models_own_is_refused() -> None:
    """SGLang names the probabilities of so many tokens at most."""
    wide = 150_000
    for how in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": v0_5.MAX_MASK_TOKENS + 1}):
        with pytest.raises(Refused, match=r"rollout\.top_k"):
            v0_5.check_sampling(request(1, **how), wide, uses_seeds=False)
    for how in ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 200}):
        v0_5.check_sampling(request(1, **how), wide, uses_seeds=False)  # type: ignore[arg-type]


def test_a_stop_text_ends_a_request_where_it_ends_the_built_in_engines() -> None:
    tokens = greedy(Listener(built_in("eager")))[0]
    across = text_of(tokens)[13:16]  # from inside one token into the next
    texts = (across, "no such text")
    expected = greedy(Listener(built_in("eager")), stop_strings=texts)
    listener = Listener(served.engine())
    assert greedy(listener, stop_strings=texts) == expected
    assert expected[0] == tokens[: len(expected[0])] and len(expected[0]) < len(tokens)
    assert listener.heard[0].finish == [FinishReason.STOP]
    # What a turn had before it came here counts.
    had = [*PROMPTS[0], *expected[0]]
    heard = listener.run(request(77, had, stop_strings=texts, turn_start=3))[77]
    assert heard.tokens == [] and heard.finish == [FinishReason.STOP]


def test_the_models_own_end_tokens_end_nothing() -> None:
    """Each request names its stop tokens, and no other ends it."""
    heard = Listener(served.engine()).run(request(1, max_new=100))[1]
    assert len(heard.tokens) == 100 and heard.finish == [FinishReason.LENGTH]


@pytest.mark.parametrize("tokens", [[1, 39, 3, 39, 5], list(range(VOCAB))], ids=["last", "all"])
def test_scores_are_those_of_the_built_in_engine(tokens: list[int]) -> None:
    row = np.array(tokens, np.int32)
    ours = built_in("eager").score(row)
    np.testing.assert_allclose(served.engine().score(row), ours, atol=ROUNDING)


def test_an_abort_takes_one_request_though_its_name_begins_anothers() -> None:
    """SGLang aborts by prefix."""
    engine = served.engine(16)
    listener = Listener(engine)
    engine.submit([request(i, max_new=100) for i in range(1, 13)])
    while engine.num_steps < 5:
        engine.step()
    engine.abort([1])
    heard = listener.run()
    assert len(heard[1].tokens) < 100
    assert all(len(heard[i].tokens) == 100 for i in range(2, 13))


LONG = [request(i, [i, 2], max_new=100, temperature=0.0) for i in range(6)]


def expected() -> dict[int, list[int]]:
    return {i: h.tokens for i, h in Listener(built_in("eager")).run(*LONG).items()}


def started() -> tuple[SGLangEngine, Listener]:
    engine = served.engine()
    engine.submit(LONG)
    while engine.num_steps < 10 and engine.step():
        pass
    assert 0 < engine.tokens_generated < 600
    return engine, Listener(engine)


def test_a_pause_takes_nothing_and_changes_nothing() -> None:
    engine, listener = started()
    for _ in range(3):
        engine.pause()
        had = engine.tokens_generated
        assert not engine.step() and engine.tokens_generated == had
        engine.resume()
        for _ in range(20):
            engine.step()
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_sleep_with_requests_at_work_and_waking_lose_no_token() -> None:
    engine, listener = started()
    engine.sleep()
    had = engine.tokens_generated
    assert not engine.step() and engine.tokens_generated == had
    with pytest.raises(Refused, match="rests"):
        engine.score(np.array([1, 2, 3], np.int32))
    engine.wake(decoder(0).state_dict(), 0)
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_it_wakes_with_other_weights_and_what_ran_goes_on_under_them() -> None:
    engine, listener = started()
    engine.sleep()
    listener.drain()
    had = {i: len(listener.heard[i].tokens) if i in listener.heard else 0 for i in range(6)}
    engine.wake(decoder(1).state_dict(), 7)
    heard = listener.run()
    other = built_in("eager", seed=1, max_length=256)
    for i, h in heard.items():
        assert h.versions == [0] * had[i] + [7] * (100 - had[i])
        again = request(i, [i, 2, *h.tokens[: had[i]]], max_new=100 - had[i], temperature=0.0)
        assert h.tokens[had[i] :] == Listener(other).run(again)[i].tokens
    assert engine.requests.relabelled_tokens == 0


def test_resting_twice_and_resuming_asleep_is_as_once() -> None:
    """As the service does: asleep it is paused too, and resumed before its weights come."""
    engine, listener = started()
    engine.sleep()
    engine.pause()
    engine.resume()
    assert not engine.step()
    engine.wake(decoder(0).state_dict(), 0)
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_what_is_aborted_while_it_stands_ends_at_once_with_what_it_had() -> None:
    engine, listener = started()
    engine.pause()
    engine.abort([0, 5])
    assert engine.has_finished
    listener.drain()
    assert listener.heard[0].finish == [FinishReason.ABORTED] and listener.heard[0].tokens
    assert listener.heard[5].finish == [FinishReason.ABORTED] and listener.heard[5].tokens == []
    engine.resume()
    heard = listener.run()
    whole = expected()
    assert {i: heard[i].tokens for i in (1, 2, 3, 4)} == {i: whole[i] for i in (1, 2, 3, 4)}
    assert heard[0].tokens == whole[0][: len(heard[0].tokens)]
