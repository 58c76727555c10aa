"""Engines of MoE models: log-probabilities of the model, and the experts of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshrl.common.base.expert_routing import NO_EXPERTS, UNKNOWN_EXPERT
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine
from meshrl.common.generation.engine_contract import (
    EngineOutput,
    combine_outputs,
    concatenate_outputs,
    select_requests,
)
from meshrl.common.model.network.decoder import Decoder, MoeDecoderLayer
from meshrl.common.model.network.moe import Routing
from tests.attention import causal_attention
from tests.unit.common.generation.engines_under_test import (
    MOE,
    PATHS,
    VOCAB,
    CollectedOutput,
    Listener,
    built_in,
    decoder,
    request,
)

Make = Callable[..., BuiltinEngine]
SHAPE = MOE.routing_shape
THREE = replace(MOE, num_experts_per_token=3)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(path: str) -> Make:
    return partial(built_in, path, config=MOE)


def words(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


def compute_by_model(
    model: Decoder, context: list[int], output: CollectedOutput, experts: torch.Tensor | None = None
) -> tuple[np.ndarray, torch.Tensor]:
    """Return the model's log-probabilities of an output, and the experts that predicted its
    tokens.
    """
    row = torch.tensor([[*context, *output.tokens]])
    positions, routing = torch.arange(row.shape[1]).unsqueeze(0), Routing()
    with torch.inference_mode():
        hidden = model(row, positions, causal_attention, experts, routing)
        logits = model.compute_logits(hidden)[0, len(context) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, row[0, len(context) :, None]).flatten()
    assert routing.experts is not None
    return chosen.numpy(), routing.experts[0, len(context) - 1 : -1]


def assert_matches_model(output: CollectedOutput, model: Decoder, context: list[int]) -> None:
    logprobs, model_experts = compute_by_model(model, context, output)
    np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)
    assert len(output.experts) == len(output.tokens)
    engine_experts = np.array(output.experts).reshape(-1, *SHAPE)
    assert np.array_equal(np.sort(engine_experts), np.sort(model_experts.numpy()))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("length", [1, 7, 33, 100])
def test_context_of_any_length_gives_the_models_logprobs_and_experts(
    make: Make, length: int
) -> None:
    context = words(length, length)
    assert_matches_model(Listener(make()).run(request(1, context))[1], decoder(0, MOE), context)


@pytest.mark.rotating(3)
def test_mixed_lengths_are_correct_in_every_slot(make: Make) -> None:
    contexts = {i: words(i, 1 + 7 * i % 90) for i in range(20)}
    outputs = Listener(make(slots=6)).run(
        *(request(i, context, max_new=5 + 3 * i % 17) for i, context in contexts.items())
    )
    for i, context in contexts.items():
        assert_matches_model(outputs[i], decoder(0, MOE), context)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "change",
    [
        {"normalise_routing": False},
        {"num_experts_per_token": 1},
        {"num_experts_per_token": 6, "dense_layers": ()},
        {"num_experts": 40, "num_experts_per_token": 8, "expert_ffn_size": 10},
        {"architecture": "mixtral", "dense_layers": (), "qk_norm": False},
    ],
    ids=["plain shares", "one expert", "all experts", "many", "mixtral"],
)
def test_other_moe_configs_give_the_models_logprobs(path: str, change: dict) -> None:  # type: ignore[type-arg]
    config = replace(MOE, **change)
    context = words(2, 20)
    output = Listener(built_in(path, config=config)).run(request(1, context))[1]
    logprobs, model_experts = compute_by_model(decoder(0, config), context, output)
    np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)
    engine_experts = np.array(output.experts).reshape(model_experts.shape)
    assert np.array_equal(np.sort(engine_experts), np.sort(model_experts.numpy()))


def test_bfloat16_logprobs_are_near_the_model(path: str) -> None:
    engine = built_in(path, config=MOE, dtype="bfloat16")
    context = words(4, 30)
    output = Listener(engine).run(request(1, context, max_new=60))[1]
    replayed = pad_experts(context, output)
    logprobs, _ = compute_by_model(decoder(0, MOE), context, output, replayed)
    assert np.abs(np.array(output.logprobs) - logprobs).mean() < 0.05


def test_experts_are_those_of_the_sampling_weights(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    engine.submit([request(1, [3], max_new=40)])
    for _ in range(10):
        engine.step()
    old_count = engine.tokens_generated
    engine.update_weights(decoder(1, MOE).state_dict(), 1)
    output = listener.run()[1]
    first = CollectedOutput(tokens=output.tokens[:old_count], experts=output.experts[:old_count])
    _, model_experts = compute_by_model(decoder(0, MOE), [3], first)
    engine_experts = np.array(first.experts).reshape(-1, *SHAPE)
    assert np.array_equal(np.sort(engine_experts), np.sort(model_experts.numpy()))
    assert len(output.experts) == 40


def test_request_continued_on_another_engine_gets_the_same_experts(make: Make) -> None:
    context = words(5, 12)
    expected = Listener(make()).run(request(1, context, max_new=30, seed=9))[1]
    first_tokens = expected.tokens[:11]
    continued = Listener(make()).run(request(1, [*context, *first_tokens], max_new=19, seed=9))[1]
    assert continued.tokens == expected.tokens[11:] and continued.experts == expected.experts[11:]


@pytest.mark.rotating(3)
def test_reused_slot_returns_no_old_experts(make: Make) -> None:
    listener = Listener(make(slots=1))
    listener.run(request(1, words(6, 40), max_new=60))
    context = words(7, 5)
    assert_matches_model(listener.run(request(2, context, max_new=60))[2], decoder(0, MOE), context)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(-1, 4)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("drain")),
        st.tuples(st.just("rest")),
    ),
    max_size=16,
)


@pytest.mark.rotating(3)
@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a backend name holds no state
)
@given(script=actions)
def test_every_token_has_its_experts_in_any_sequence_of_calls(path: str, script: list) -> None:  # type: ignore[type-arg]
    engine = built_in(path, slots=3, max_length=64, config=MOE, kv_cache_tokens=96)
    listener, model = Listener(engine), decoder(0, MOE)
    contexts: list[list[int]] = []
    for action, *arguments in script:
        match action:
            case "submit":
                length, max_new, session = arguments
                context = [(3 * session + i * i) % VOCAB for i in range(length)]
                engine.submit([request(len(contexts), context, max_new=max_new, session=session)])
                contexts.append(context)
            case "step":
                for _ in range(arguments[0]):
                    engine.step()
            case "abort":
                engine.abort(arguments)
            case "drain":
                listener.drain()
            case "rest":
                engine.sleep()
                engine.wake(model.state_dict(), engine.version)
    outputs = listener.run()
    for id, context in enumerate(contexts):
        if outputs[id].tokens:
            assert_matches_model(outputs[id], model, context)


def test_dense_model_returns_no_experts(path: str) -> None:
    output = Listener(built_in(path)).run(request(1))[1]
    assert output.experts == []


def pad_experts(
    context: list[int], output: CollectedOutput, shape: tuple[int, int] = SHAPE
) -> torch.Tensor:
    """Return experts as training receives them: for each position those that predicted the next
    token.
    """
    output_experts = torch.tensor(output.experts).view(-1, *shape)
    prompt_experts = torch.full((len(context) - 1, *shape), UNKNOWN_EXPERT)
    return torch.cat((prompt_experts, output_experts, torch.full((1, *shape), UNKNOWN_EXPERT)))[
        None
    ]


def make_paired_experts_model(noise: float, seed: int) -> Decoder:
    """Return a model with pairs of equal experts, of which a router takes one pair and half
    another.
    """
    model = decoder(0, THREE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for index in THREE.sparse_layers:
            router = cast(MoeDecoderLayer, model.layers[index]).experts.router
            router[1::2] = router[::2]
            router.add_(noise * torch.randn(router.shape, generator=generator))
    return model


def test_replayed_experts_give_the_engines_logprobs_under_another_router(
    path: str,
) -> None:
    engine = built_in(path, config=THREE)
    engine.update_weights(make_paired_experts_model(1e-6, seed=1).state_dict(), 1)
    output = Listener(engine).run(request(1, [3], max_new=100))[1]
    other_model = make_paired_experts_model(1e-6, seed=2)
    free_logprobs, model_experts = compute_by_model(other_model, [3], output)
    replayed, _ = compute_by_model(
        other_model, [3], output, pad_experts([3], output, THREE.routing_shape)
    )
    engine_experts = np.array(output.experts).reshape(model_experts.shape)
    differs = (np.sort(engine_experts) != np.sort(model_experts.numpy())).any((1, 2))
    assert differs.mean() > 0.3
    assert np.abs(np.array(output.logprobs) - free_logprobs).max() > 0.1
    np.testing.assert_allclose(output.logprobs, replayed, atol=1e-4)


def make_output(ids: list[int], counts: list[int], experts: np.ndarray) -> EngineOutput:
    total = sum(counts)
    return EngineOutput(
        ids=np.array(ids),
        counts=np.array(counts, np.int32),
        tokens=np.zeros(total, np.int32),
        logprobs=np.zeros(total, np.float32),
        raw_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(total, np.int32),
        finish_reasons=np.zeros(len(ids), np.int8),
        experts=experts,
    )


def test_outputs_with_and_without_experts_are_combined_and_split() -> None:
    with_experts = make_output([1, 2], [2, 1], np.arange(12, dtype=np.int16).reshape(3, 4))
    without_experts = make_output([3], [2], NO_EXPERTS)
    combined = concatenate_outputs(with_experts, without_experts)
    assert combined.experts.dtype == np.int16
    assert combined.experts.tolist() == [
        *with_experts.experts.tolist(),
        *[[UNKNOWN_EXPERT] * 4] * 2,
    ]
    assert select_requests(combined, np.array([False, True, False])).experts.tolist() == [
        [8, 9, 10, 11]
    ]
    assert len(concatenate_outputs(without_experts, without_experts).experts) == 0
    assert combine_outputs([]) is None
