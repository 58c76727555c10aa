"""Draws by counter, filters of sampling, and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.common.generation.backends.sampling import RowSamplingParams, sample_tokens
from meshrl.common.generation.counter_rng import draw_uint64, draw_uniforms, seed_to_key
from tests.unit.common.generation.engines_under_test import (
    BUILT_IN,
    VOCAB,
    Listener,
    built_in,
    decoder,
    request,
    simulated,
    text_of,
)
from tests.unit.common.generation.test_builtin_engine import (
    Make,
    expected_logprobs,
    holds,
    make,
    next_logprobs,
    words,
)

__all__ = ["make"]
CONTEXT = words(8, 12)


def model_probabilities(context: list[int], temperature: float = 1.0) -> np.ndarray:
    return np.exp(next_logprobs(decoder(), context, temperature).astype(np.float64))


def kept_by(how: dict[str, float], probability: np.ndarray) -> set[int]:
    """The tokens that stay, by the definition."""
    order = sorted(range(VOCAB), key=lambda w: (-probability[w], w))
    order = order[: int(how.get("top_k", 0)) or VOCAB]
    mass = sum(probability[w] for w in order)
    kept: list[int] = []
    for w in order:
        if kept and sum(probability[k] for k in kept) >= how.get("top_p", 1.0) * mass:
            break
        kept.append(w)
    return {w for w in kept if probability[w] >= how.get("min_p", 0.0) * probability[kept[0]]}


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.2, "temperature": 1.7},
        {"temperature": 0.4},
    ],
)
def test_sampling_keeps_what_the_filters_keep_and_nothing_else(
    make: Make, how: dict[str, Any]
) -> None:
    engine = make(slots=64)
    heard = Listener(engine).run(
        *(request(i, CONTEXT, max_new=1, wants_raw_logprobs=True, **how) for i in range(600))
    )
    probability = model_probabilities(CONTEXT, how.get("temperature", 1.0))
    kept = kept_by(how, probability)
    mass = sum(probability[w] for w in kept)
    seen = {h.tokens[0] for h in heard.values()}
    assert seen <= kept
    assert {w for w in kept if probability[w] / mass > 0.02} <= seen
    plain = np.log(model_probabilities(CONTEXT))
    for h in heard.values():
        token = h.tokens[0]
        assert h.logprobs[0] == pytest.approx(np.log(probability[token] / mass), abs=2e-4)
        assert h.unmodified[0] == pytest.approx(plain[token], abs=2e-4)


@pytest.mark.rotating(3)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("how", [{}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.1}])
def test_all_paths_sample_the_same_tokens(how: dict[str, Any]) -> None:
    heard = {
        path: Listener(built_in(path)).run(
            *(request(i, words(i, 5), max_new=12, **how) for i in range(12))
        )
        for path in BUILT_IN
    }
    same = [heard["native"][i].tokens == heard["graphs"][i].tokens for i in range(12)]
    assert sum(same) >= 11  # a draw may lie between two roundings of a border


def test_unmodified_logprobs_come_only_to_those_who_asked(make: Make) -> None:
    heard = Listener(make()).run(
        request(1, wants_raw_logprobs=True, temperature=0.5, max_new=9), request(2, max_new=9)
    )
    expected = expected_logprobs(decoder(), [1, 2, 3], heard[1].tokens)
    np.testing.assert_allclose(heard[1].unmodified, expected, atol=2e-4)
    assert np.isnan(heard[2].unmodified).all()


def test_a_stop_text_ends_a_request_with_the_token_that_completes_it(make: Make) -> None:
    whole = Listener(make()).run(request(1, CONTEXT, max_new=40))[1].tokens
    text = text_of(whole)
    stop = text[21:26]  # across token borders: a token is two letters
    heard = Listener(make()).run(request(1, CONTEXT, max_new=40, stop_strings=("never?", stop)))[1]
    end = -(-(text.index(stop) + len(stop)) // 2)
    assert heard.tokens == whole[:end] and heard.finish == [FinishReason.STOP]


def test_a_stop_text_in_the_prompt_stops_nothing(make: Make) -> None:
    stop = text_of(CONTEXT[-2:])
    heard = Listener(make()).run(request(1, CONTEXT, max_new=6, stop_strings=(stop,)))[1]
    assert len(heard.tokens) == 6 or heard.finish == [FinishReason.STOP]


@pytest.mark.parametrize("kind", ["eager", "simulated"])
def test_a_stop_text_without_a_tokenizer_is_refused(kind: str) -> None:
    engine = built_in("eager", decode=None) if kind == "eager" else simulated()[0]
    with pytest.raises(Refused, match="tokenizer"):
        engine.submit([request(1, stop_strings=("x",))])


@pytest.mark.parametrize(
    "odd", [{"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -1.0}, {"top_k": -1}, {"stop_strings": ("",)}]
)
def test_impossible_sampling_is_refused(make: Make, odd: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="request 1"):
        make().submit([request(1, **odd)])


def test_a_stop_text_that_another_engine_had_begun_is_found(make: Make) -> None:
    whole = Listener(make()).run(request(1, CONTEXT, max_new=40))[1].tokens
    stop = text_of(whole)[8:16]  # tokens 4 to 7
    listener = Listener(make())
    begun = request(1, CONTEXT + whole[:6], max_new=34, seed=1, turn_start=12, stop_strings=(stop,))
    over = request(2, CONTEXT + whole[:8], max_new=32, seed=1, turn_start=12, stop_strings=(stop,))
    heard = listener.run(begun, over)
    assert heard[1].tokens == whole[6:8] and heard[1].finish == [FinishReason.STOP]
    assert heard[2].tokens == [] and heard[2].finish == [FinishReason.STOP]


def test_a_model_that_gives_no_numbers_is_told_by_its_logprobs(make: Make) -> None:
    engine = make()
    broken = decoder().state_dict()
    broken["final_norm"] = broken["final_norm"] * float("nan")
    engine.update_weights(broken, 1)
    heard = Listener(engine).run(request(1, max_new=3), request(2, max_new=3, temperature=0))
    assert np.isnan(heard[1].logprobs + heard[2].logprobs).all()
    engine.update_weights(decoder().state_dict(), 2)
    holds(Listener(engine).run(request(3, CONTEXT))[3], decoder(), CONTEXT)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 3] = 0.0
    how = RowSamplingParams(
        *(np.array([x], t) for x, t in ((1, "f4"), (1, "f4"), (0, "i8"), (0, "f4")))
    )
    for uniform in (1e-9, 0.5, 1 - 1e-9):
        tokens, logprobs = sample_tokens(logits, how, np.array([uniform]))
        assert tokens.tolist() == [3] and logprobs[0] == 0


def keys(seeds: range) -> np.ndarray:
    return np.array([seed_to_key(seed) for seed in seeds], np.uint64)


def test_draws_are_those_of_splitmix64_by_seed_and_position_alone() -> None:
    """The reference implementation's first outputs for state 1234567."""
    state = np.array([1234567], np.uint64)
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert draw_uint64(state, np.arange(3)).tolist() == first
    together = draw_uniforms(keys(range(50))[:, None], np.arange(40))
    alone = draw_uniforms(keys(range(17, 18)), np.array([23]))
    assert together[17, 23] == alone[0]
    assert len({seed_to_key(seed) for seed in (-1, 0, 1, 2**63, 2**64 - 2)}) == 5


@pytest.mark.parametrize("axis", [0, 1], ids=["over seeds", "over positions"])
def test_draws_are_uniform_and_neighbours_are_not_correlated(axis: int) -> None:
    drawn = draw_uniforms(keys(range(300))[:, None], np.arange(300))
    assert ((drawn > 0) & (drawn < 1)).all()
    counts, _ = np.histogram(drawn, bins=50, range=(0, 1))
    assert ((counts - 1800) ** 2 / 1800).sum() < 90  # chi-square with 49 degrees of freedom
    a, b = np.take(drawn, range(299), axis), np.take(drawn, range(1, 300), axis)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
