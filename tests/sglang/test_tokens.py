"""Tokens of a real SGLang server, compared with the built-in engine's, and over its REST
interface.
"""

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
from tests.unit.common.generation.test_sampling import (
    CONTEXT,
    model_probabilities,
    select_kept_tokens,
)

PROMPTS = [[1, 2, 3], [4, 39, 6, 7], [0] * 20, list(range(VOCAB))]
ROUNDING = 1e-4  # float32 in another order of summation; 1e-6 as measured


def greedy(listener: Listener, **more: object) -> list[list[int]]:
    requests = [
        request(i, prompt, temperature=0.0, **{"max_new": 40} | more)  # type: ignore[arg-type]
        for i, prompt in enumerate(PROMPTS)
    ]
    heard = listener.run(*requests)
    return [heard[i].tokens for i in range(len(PROMPTS))]


def test_logprobs_match_the_built_in_engine(
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


def test_greedy_tokens_match_the_built_in_engine() -> None:
    assert greedy(Listener(served.engine())) == greedy(Listener(built_in("eager")))


def test_resubmitted_request_continues_identically() -> None:
    whole = Listener(served.engine()).run(request(1, [5, 6], max_new=40, temperature=0.0))[1]
    rest = Listener(served.engine()).run(
        request(1, [5, 6, *whole.tokens[:15]], max_new=25, temperature=0.0, turn_start=2)
    )[1]
    assert rest.tokens == whole.tokens[15:]


def filter_as_sglang(how: dict[str, float], probability: np.ndarray) -> set[int]:
    """Return the tokens that SGLang's filters retain; each filter uses the whole distribution."""
    apart = [
        select_kept_tokens({name: how[name]}, probability) for name in how if name != "temperature"
    ]
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
def test_logprobs_are_of_the_sampling_distribution(how: dict[str, float]) -> None:
    """Mix greedy and plain requests into the batch, whose log-probabilities are the model's."""
    requests = [
        request(i, CONTEXT, max_new=1, wants_raw_logprobs=True, **how if i % 3 else {})  # type: ignore[arg-type]
        for i in range(240)
    ]
    requests.append(request(999, CONTEXT, max_new=1, wants_raw_logprobs=True, temperature=0.0))
    heard = Listener(served.engine(48)).run(*requests)
    probability = model_probabilities(CONTEXT, how.get("temperature", 1.0))
    retained = filter_as_sglang(how, probability)
    mass = sum(probability[w] for w in retained)
    plain = np.log(model_probabilities(CONTEXT))
    assert len(heard) == 241
    assert heard[999].tokens == [int(plain.argmax())]
    for i, h in heard.items():
        token = h.tokens[0]
        assert h.raw_logprobs[0] == pytest.approx(plain[token], abs=2e-4)
        if i % 3 and i != 999:
            assert token in retained
            assert h.logprobs[0] == pytest.approx(np.log(probability[token] / mass), abs=2e-4)
        else:
            assert h.logprobs[0] == h.raw_logprobs[0]


def test_too_wide_sampling_distribution_is_rejected() -> None:
    """Exceed the number of tokens whose probabilities SGLang returns."""
    wide = 150_000
    for how in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": v0_5.MAX_MASK_TOKENS + 1}):
        with pytest.raises(Refused, match=r"rollout\.top_k"):
            v0_5.check_sampling(request(1, **how), wide, uses_seeds=False)
    for how in ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 200}):
        v0_5.check_sampling(request(1, **how), wide, uses_seeds=False)  # type: ignore[arg-type]


def test_stop_text_ends_a_request_like_the_built_in_engine() -> None:
    tokens = greedy(Listener(built_in("eager")))[0]
    across = text_of(tokens)[13:16]  # a text that spans two tokens
    texts = (across, "no such text")
    expected = greedy(Listener(built_in("eager")), stop_strings=texts)
    listener = Listener(served.engine())
    assert greedy(listener, stop_strings=texts) == expected
    assert expected[0] == tokens[: len(expected[0])] and len(expected[0]) < len(tokens)
    assert listener.outputs[0].finish == [FinishReason.STOP]
    # Tokens of the turn before this request count.
    had = [*PROMPTS[0], *expected[0]]
    heard = listener.run(request(77, had, stop_strings=texts, turn_start=3))[77]
    assert heard.tokens == [] and heard.finish == [FinishReason.STOP]


def test_end_tokens_of_the_model_are_ignored() -> None:
    """Stop only at the stop tokens of each request."""
    heard = Listener(served.engine()).run(request(1, max_new=100))[1]
    assert len(heard.tokens) == 100 and heard.finish == [FinishReason.LENGTH]


@pytest.mark.parametrize("tokens", [[1, 39, 3, 39, 5], list(range(VOCAB))], ids=["last", "all"])
def test_scores_match_the_built_in_engine(tokens: list[int]) -> None:
    row = np.array(tokens, np.int32)
    ours = built_in("eager").score(row)
    np.testing.assert_allclose(served.engine().score(row), ours, atol=ROUNDING)


def test_abort_ends_one_request_whose_name_prefixes_another() -> None:
    """Send names with a common prefix, because SGLang aborts by prefix."""
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


def start_requests() -> tuple[SGLangEngine, Listener]:
    engine = served.engine()
    engine.submit(LONG)
    while engine.num_steps < 10 and engine.step():
        pass
    assert 0 < engine.tokens_generated < 600
    return engine, Listener(engine)


def test_pause_changes_no_token() -> None:
    engine, listener = start_requests()
    for _ in range(3):
        engine.pause()
        had = engine.tokens_generated
        assert not engine.step() and engine.tokens_generated == had
        engine.resume()
        for _ in range(20):
            engine.step()
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_time_slices_change_no_token() -> None:
    engine, listener = start_requests()
    for _ in range(3):
        engine.end_slice()
        had = engine.tokens_generated
        assert not engine.num_running and engine.tokens_generated == had
        for _ in range(20):
            engine.step()
    engine.end_slice()
    cache = engine.collect_cache()
    cache.release()
    cache.reallocate()
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_sleep_and_wake_with_running_requests_lose_no_token() -> None:
    engine, listener = start_requests()
    engine.sleep()
    had = engine.tokens_generated
    assert not engine.step() and engine.tokens_generated == had
    with pytest.raises(Refused, match="asleep"):
        engine.score(np.array([1, 2, 3], np.int32))
    engine.wake(decoder(0).state_dict(), 0)
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_requests_continue_with_new_weights_after_waking() -> None:
    engine, listener = start_requests()
    engine.sleep()
    listener.drain()
    had = {i: len(listener.outputs[i].tokens) if i in listener.outputs else 0 for i in range(6)}
    engine.wake(decoder(1).state_dict(), 7)
    heard = listener.run()
    other = built_in("eager", seed=1, max_length=256)
    for i, h in heard.items():
        assert h.versions == [0] * had[i] + [7] * (100 - had[i])
        again = request(i, [i, 2, *h.tokens[: had[i]]], max_new=100 - had[i], temperature=0.0)
        assert h.tokens[had[i] :] == Listener(other).run(again)[i].tokens
    assert engine.requests.relabelled_tokens == 0


def test_repeated_pause_and_resume_during_sleep_are_idempotent() -> None:
    """Pause a sleeping engine and resume it before its weights arrive, as the service does."""
    engine, listener = start_requests()
    engine.sleep()
    engine.pause()
    engine.resume()
    assert not engine.step()
    engine.wake(decoder(0).state_dict(), 0)
    assert {i: h.tokens for i, h in listener.run().items()} == expected()


def test_abort_during_a_pause_ends_at_once_with_earlier_tokens() -> None:
    engine, listener = start_requests()
    engine.pause()
    engine.abort([0, 5])
    assert engine.has_finished
    listener.drain()
    assert listener.outputs[0].finish == [FinishReason.ABORTED] and listener.outputs[0].tokens
    assert listener.outputs[5].finish == [FinishReason.ABORTED] and listener.outputs[5].tokens == []
    engine.resume()
    heard = listener.run()
    whole = expected()
    assert {i: heard[i].tokens for i in (1, 2, 3, 4)} == {i: whole[i] for i in (1, 2, 3, 4)}
    assert heard[0].tokens == whole[0][: len(heard[0].tokens)]
