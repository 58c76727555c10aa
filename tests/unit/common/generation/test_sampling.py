"""Counter-based random numbers, sampling filters, and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.api.engine import FinishReason, LogitAdjustments
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
    assert_matches_model,
    expected_logprobs,
    make,
    next_logits,
    next_logprobs,
    words,
)

__all__ = ["make"]
CONTEXT = words(8, 12)


def model_probabilities(context: list[int], temperature: float = 1.0) -> np.ndarray:
    return np.exp(next_logprobs(decoder(), context, temperature).astype(np.float64))


def select_kept_tokens(filters: dict[str, float], probability: np.ndarray) -> set[int]:
    """Return the tokens that the filters keep, by definition."""
    order = sorted(range(VOCAB), key=lambda token: (-probability[token], token))
    order = order[: int(filters.get("top_k", 0)) or VOCAB]
    mass = sum(probability[token] for token in order)
    kept_tokens: list[int] = []
    for token in order:
        if (
            kept_tokens
            and sum(probability[k] for k in kept_tokens) >= filters.get("top_p", 1.0) * mass
        ):
            break
        kept_tokens.append(token)
    return {
        token
        for token in kept_tokens
        if probability[token] >= filters.get("min_p", 0.0) * probability[kept_tokens[0]]
    }


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "filters",
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
def test_filters_keep_exactly_the_defined_tokens(make: Make, filters: dict[str, Any]) -> None:
    engine = make(slots=64)
    outputs = Listener(engine).run(
        *(request(i, CONTEXT, max_new=1, wants_raw_logprobs=True, **filters) for i in range(600))
    )
    probability = model_probabilities(CONTEXT, filters.get("temperature", 1.0))
    kept_tokens = select_kept_tokens(filters, probability)
    mass = sum(probability[w] for w in kept_tokens)
    sampled_tokens = {h.tokens[0] for h in outputs.values()}
    assert sampled_tokens <= kept_tokens
    assert {w for w in kept_tokens if probability[w] / mass > 0.02} <= sampled_tokens
    raw_logprobs = np.log(model_probabilities(CONTEXT))
    for h in outputs.values():
        token = h.tokens[0]
        assert h.logprobs[0] == pytest.approx(np.log(probability[token] / mass), abs=2e-4)
        assert h.raw_logprobs[0] == pytest.approx(raw_logprobs[token], abs=2e-4)


@pytest.mark.rotating(3)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.1}])
def test_all_backends_sample_the_same_tokens(filters: dict[str, Any]) -> None:
    outputs = {
        path: Listener(built_in(path)).run(
            *(request(i, words(i, 5), max_new=12, **filters) for i in range(12))
        )
        for path in BUILT_IN
    }
    same = [outputs["native"][i].tokens == outputs["graphs"][i].tokens for i in range(12)]
    assert sum(same) >= 11  # a draw may fall between two roundings of a bound


def test_raw_logprobs_are_returned_only_on_request(make: Make) -> None:
    outputs = Listener(make()).run(
        request(1, wants_raw_logprobs=True, temperature=0.5, max_new=9), request(2, max_new=9)
    )
    expected = expected_logprobs(decoder(), [1, 2, 3], outputs[1].tokens)
    np.testing.assert_allclose(outputs[1].raw_logprobs, expected, atol=2e-4)
    assert np.isnan(outputs[2].raw_logprobs).all()


def test_stop_string_ends_a_request_with_its_last_token(make: Make) -> None:
    expected = Listener(make()).run(request(1, CONTEXT, max_new=40))[1].tokens
    text = text_of(expected)
    stop = text[21:26]  # across token boundaries: a token is two letters
    output = Listener(make()).run(request(1, CONTEXT, max_new=40, stop_strings=("never?", stop)))[1]
    end = -(-(text.index(stop) + len(stop)) // 2)
    assert output.tokens == expected[:end] and output.finish == [FinishReason.STOP]


def test_stop_string_in_the_prompt_is_ignored(make: Make) -> None:
    stop = text_of(CONTEXT[-2:])
    output = Listener(make()).run(request(1, CONTEXT, max_new=6, stop_strings=(stop,)))[1]
    assert len(output.tokens) == 6 or output.finish == [FinishReason.STOP]


@pytest.mark.parametrize("kind", ["eager", "simulated"])
def test_stop_string_without_a_tokenizer_is_rejected(kind: str) -> None:
    engine = built_in("eager", decode_tokens=None) if kind == "eager" else simulated()[0]
    with pytest.raises(Refused, match="tokenizer"):
        engine.submit([request(1, stop_strings=("x",))])


@pytest.mark.parametrize(
    "params",
    [
        *({"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -1.0}, {"top_k": -1}, {"stop_strings": ("",)}),
        {"adjustments": LogitAdjustments(((VOCAB, 1.0),))},
        {"adjustments": LogitAdjustments(((1, float("inf")),))},
        {"adjustments": LogitAdjustments(repetition_penalty=0.0)},
        {"adjustments": LogitAdjustments(presence_penalty=float("nan"))},
        {"adjustments": LogitAdjustments(min_tokens=-1)},
    ],
    ids=str,
)
def test_invalid_sampling_params_are_rejected(make: Make, params: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="request 1"):
        make().submit([request(1, **params)])


def test_stop_string_begun_on_another_engine_is_found(make: Make) -> None:
    expected = Listener(make()).run(request(1, CONTEXT, max_new=40))[1].tokens
    stop = text_of(expected)[8:16]  # tokens 4 to 7
    listener = Listener(make())
    partial_stop = request(
        1, CONTEXT + expected[:6], max_new=34, seed=1, turn_start=12, stop_strings=(stop,)
    )
    complete_stop = request(
        2, CONTEXT + expected[:8], max_new=32, seed=1, turn_start=12, stop_strings=(stop,)
    )
    outputs = listener.run(partial_stop, complete_stop)
    assert outputs[1].tokens == expected[6:8] and outputs[1].finish == [FinishReason.STOP]
    assert outputs[2].tokens == [] and outputs[2].finish == [FinishReason.STOP]


def test_non_finite_model_gives_nan_logprobs(make: Make) -> None:
    engine = make()
    broken = decoder().state_dict()
    broken["final_norm"] = broken["final_norm"] * float("nan")
    engine.update_weights(broken, 1)
    outputs = Listener(engine).run(request(1, max_new=3), request(2, max_new=3, temperature=0))
    assert np.isnan(outputs[1].logprobs + outputs[2].logprobs).all()
    engine.update_weights(decoder().state_dict(), 2)
    assert_matches_model(Listener(engine).run(request(3, CONTEXT))[3], decoder(), CONTEXT)


def test_token_of_probability_zero_is_never_sampled() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 3] = 0.0
    params = RowSamplingParams(
        *(np.array([x], t) for x, t in ((1, "f4"), (1, "f4"), (0, "i8"), (0, "f4")))
    )
    for uniform in (1e-9, 0.5, 1 - 1e-9):
        tokens, logprobs = sample_tokens(logits, params, np.array([uniform]))
        assert tokens.tolist() == [3] and logprobs[0] == 0


def keys(seeds: range) -> np.ndarray:
    return np.array([seed_to_key(seed) for seed in seeds], np.uint64)


def test_draws_are_splitmix64_of_seed_and_position() -> None:
    """Check the first outputs of the reference implementation for state 1234567."""
    state = np.array([1234567], np.uint64)
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert draw_uint64(state, np.arange(3)).tolist() == first
    all_draws = draw_uniforms(keys(range(50))[:, None], np.arange(40))
    single_draw = draw_uniforms(keys(range(17, 18)), np.array([23]))
    assert all_draws[17, 23] == single_draw[0]
    assert len({seed_to_key(seed) for seed in (-1, 0, 1, 2**63, 2**64 - 2)}) == 5


@pytest.mark.parametrize("axis", [0, 1], ids=["over seeds", "over positions"])
def test_draws_are_uniform_and_uncorrelated(axis: int) -> None:
    samples = draw_uniforms(keys(range(300))[:, None], np.arange(300))
    assert ((samples > 0) & (samples < 1)).all()
    counts, _ = np.histogram(samples, bins=50, range=(0, 1))
    assert ((counts - 1800) ** 2 / 1800).sum() < 90  # chi-square with 49 degrees of freedom
    first, second = np.take(samples, range(299), axis), np.take(samples, range(1, 300), axis)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def adjusted_logprobs(
    context: list[int], written: list[int], adjustments: LogitAdjustments, stop_ids: tuple[int, ...]
) -> np.ndarray:
    """Return log-probabilities of every next token, by the definitions in vLLM's documentation."""
    logits = next_logits(decoder(), [*context, *written]).astype(np.float64)
    for token, bias in adjustments.logit_bias:
        logits[token] += bias
    for token in {*context, *written}:
        scale = adjustments.repetition_penalty
        logits[token] *= scale if logits[token] < 0 else 1 / scale
    for token in set(written):
        logits[token] -= adjustments.presence_penalty
    if len(written) < adjustments.min_tokens:
        logits[list(stop_ids)] = -np.inf
    peak = logits.max()
    logprobs: np.ndarray = logits - peak - np.log(np.exp(logits - peak).sum())
    return logprobs


STOPS = (3, 5, 7)
ADJUSTMENTS = [
    LogitAdjustments(logit_bias=((4, -100.0), (9, 2.5), (11, 1.0), (12, 1.0), (13, 1.0))),
    LogitAdjustments(repetition_penalty=1.8),
    LogitAdjustments(repetition_penalty=0.6),
    LogitAdjustments(presence_penalty=1.5),
    LogitAdjustments(min_tokens=12),
    LogitAdjustments(((6, 1.0),), 1.3, -0.7, 5),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adjusted_logits_are_those_of_the_definition_wherever_a_turn_continues(
    make: Make, temperature: float
) -> None:
    """Batch all adjustments with a plain request, and continue the turns on another engine."""
    how: dict[str, Any] = {"temperature": temperature, "stop_ids": STOPS, "max_new": 20}
    plain = request(99, CONTEXT, seed=1, **how)
    options = [
        how | {"adjustments": adjustments, "seed": 1, "wants_raw_logprobs": True}
        for adjustments in ADJUSTMENTS
    ]
    adjusted = [request(i, CONTEXT, **more) for i, more in enumerate(options)]
    outputs = Listener(make(slots=8)).run(*adjusted, plain)
    for i, adjustments in enumerate(ADJUSTMENTS):
        tokens = outputs[i].tokens
        for at, token in enumerate(tokens):
            expected = adjusted_logprobs(CONTEXT, tokens[:at], adjustments, STOPS)
            assert outputs[i].logprobs[at] == pytest.approx(expected[token], abs=2e-4)
            assert temperature or expected[token] >= expected.max() - 2e-4
        raw = expected_logprobs(decoder(), CONTEXT, tokens)
        np.testing.assert_allclose(outputs[i].raw_logprobs, raw, atol=2e-4)
    alone = Listener(make()).run(plain)[99]
    assert outputs[99].tokens == alone.tokens
    np.testing.assert_allclose(outputs[99].logprobs, alone.logprobs, atol=1e-5)
    halves = [len(outputs[i].tokens) // 2 for i in range(len(options))]
    sequels = [
        request(
            i,
            CONTEXT + outputs[i].tokens[:half],
            turn_start=len(CONTEXT),
            **more | {"max_new": 20 - half},
        )
        for i, (half, more) in enumerate(zip(halves, options, strict=True))
    ]
    rest = Listener(make(slots=8)).run(*sequels)
    for i, half in enumerate(halves):
        assert rest[i].tokens == outputs[i].tokens[half:], ADJUSTMENTS[i]
        assert rest[i].finish == outputs[i].finish


def test_no_stop_ends_a_turn_before_its_least_tokens(make: Make) -> None:
    everything = {"stop_ids": (*range(1, VOCAB),), "temperature": 0.0, "max_new": 30}
    least = LogitAdjustments(min_tokens=9)
    stopped, sequel = (
        Listener(make()).run(request(1, CONTEXT, adjustments=least, **how))[1]
        for how in (everything, {"max_new": 30})
    )
    assert stopped.tokens[:9] == [0] * 9 and len(stopped.tokens) == 10
    text = text_of(sequel.tokens)
    early, late = text[4:8], text[18:24]
    output = Listener(make()).run(
        request(1, CONTEXT, max_new=30, adjustments=least, stop_strings=(early, late))
    )[1]
    assert output.tokens == sequel.tokens[:12] and output.finish == [FinishReason.STOP]


@pytest.mark.needs("compiler")
def test_backends_sample_the_same_tokens_from_adjusted_logits() -> None:
    count = 6  # requests with the same adjustments
    requests = [
        request(count * i + j, words(j, 5), stop_ids=STOPS, adjustments=adjustments, top_p=0.9)
        for i, adjustments in enumerate(ADJUSTMENTS)
        for j in range(count)
    ]
    native, graphs = (
        Listener(built_in(path, slots=len(requests))).run(*requests) for path in BUILT_IN
    )
    same = [native[one.id].tokens == graphs[one.id].tokens for one in requests]
    assert sum(same) >= len(same) * 11 // 12  # a draw may fall between two roundings
    for i, adjustments in enumerate(ADJUSTMENTS):
        assert sum(same[count * i : count * (i + 1)]) >= count - 1, adjustments
