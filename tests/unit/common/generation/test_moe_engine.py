"""Engines of mixtures of experts: they compute what the model says, and tell where tokens went."""

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
    VOCAB,
    Heard,
    Listener,
    built_in,
    decoder,
    request,
)

Make = Callable[..., BuiltinEngine]
SHAPE = MOE.routing_shape
THREE = replace(MOE, num_experts_per_token=3)


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.needs("compiler")), "graphs"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(path: str) -> Make:
    return partial(built_in, path, config=MOE)


def words(seed: int, count: int) -> list[int]:
    made: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return made


def trained(
    model: Decoder, context: list[int], heard: Heard, experts: torch.Tensor | None = None
) -> tuple[np.ndarray, torch.Tensor]:
    """Log-probabilities of what was heard, and where the tokens that predicted it went."""
    row = torch.tensor([[*context, *heard.tokens]])
    places, routing = torch.arange(row.shape[1]).unsqueeze(0), Routing()
    with torch.inference_mode():
        hidden = model(row, places, causal_attention, experts, routing)
        logits = model.compute_logits(hidden)[0, len(context) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, row[0, len(context) :, None]).flatten()
    assert routing.experts is not None
    return chosen.numpy(), routing.experts[0, len(context) - 1 : -1]


def holds(heard: Heard, model: Decoder, context: list[int]) -> None:
    logprobs, went = trained(model, context, heard)
    np.testing.assert_allclose(heard.logprobs, logprobs, atol=1e-4)
    assert len(heard.experts) == len(heard.tokens)
    told = np.array(heard.experts).reshape(-1, *SHAPE)
    assert np.array_equal(np.sort(told), np.sort(went.numpy()))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("length", [1, 7, 33, 100])
def test_a_context_of_any_length_gives_the_models_logprobs_and_experts(
    make: Make, length: int
) -> None:
    context = words(length, length)
    holds(Listener(make()).run(request(1, context))[1], decoder(0, MOE), context)


@pytest.mark.rotating(3)
def test_many_lengths_at_once_are_right_in_every_slot(make: Make) -> None:
    contexts = {i: words(i, 1 + 7 * i % 90) for i in range(20)}
    heard = Listener(make(slots=6)).run(
        *(request(i, context, max_new=5 + 3 * i % 17) for i, context in contexts.items())
    )
    for i, context in contexts.items():
        holds(heard[i], decoder(0, MOE), context)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "change",
    [
        {"normalise_routing": False},
        {"experts_per_token": 1},
        {"experts_per_token": 6, "dense_layers": ()},
        {"experts": 40, "experts_per_token": 8, "expert_ffn_size": 10},
        {"architecture": "mixtral", "dense_layers": (), "qk_norm": False},
    ],
    ids=["plain shares", "one expert", "all experts", "many", "mixtral"],
)
def test_other_mixtures_give_the_models_logprobs(path: str, change: dict) -> None:  # type: ignore[type-arg]
    config = replace(MOE, **change)
    context = words(2, 20)
    heard = Listener(built_in(path, config=config)).run(request(1, context))[1]
    logprobs, went = trained(decoder(0, config), context, heard)
    np.testing.assert_allclose(heard.logprobs, logprobs, atol=1e-4)
    told = np.array(heard.experts).reshape(went.shape)
    assert np.array_equal(np.sort(told), np.sort(went.numpy()))


def test_bfloat16_is_near_the_model(path: str) -> None:
    engine = built_in(path, config=MOE, dtype="bfloat16")
    context = words(4, 30)
    heard = Listener(engine).run(request(1, context, max_new=60))[1]
    replayed = experts_of(context, heard)
    logprobs, _ = trained(decoder(0, MOE), context, heard, replayed)
    assert np.abs(np.array(heard.logprobs) - logprobs).mean() < 0.05


def test_experts_are_those_of_the_weights_that_sampled(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    engine.submit([request(1, [3], max_new=40)])
    for _ in range(10):
        engine.step()
    before = engine.tokens_generated
    engine.update_weights(decoder(1, MOE).state_dict(), 1)
    heard = listener.run()[1]
    first = Heard(tokens=heard.tokens[:before], experts=heard.experts[:before])
    _, went = trained(decoder(0, MOE), [3], first)
    told = np.array(first.experts).reshape(-1, *SHAPE)
    assert np.array_equal(np.sort(told), np.sort(went.numpy()))
    assert len(heard.experts) == 40


def test_a_request_that_goes_on_elsewhere_gets_the_same_experts(make: Make) -> None:
    context = words(5, 12)
    whole = Listener(make()).run(request(1, context, max_new=30, seed=9))[1]
    begun = whole.tokens[:11]
    rest = Listener(make()).run(request(1, [*context, *begun], max_new=19, seed=9))[1]
    assert rest.tokens == whole.tokens[11:] and rest.experts == whole.experts[11:]


@pytest.mark.rotating(3)
def test_a_slot_that_is_used_again_tells_no_old_experts(make: Make) -> None:
    listener = Listener(make(slots=1))
    listener.run(request(1, words(6, 40), max_new=60))
    context = words(7, 5)
    holds(listener.run(request(2, context, max_new=60))[2], decoder(0, MOE), context)


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
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a path does not wear out
)
@given(script=actions)
def test_whatever_happens_every_token_comes_with_its_experts(path: str, script: list) -> None:  # type: ignore[type-arg]
    engine = built_in(path, slots=3, max_length=64, config=MOE, kv_cache_tokens=96)
    listener, model = Listener(engine), decoder(0, MOE)
    contexts: list[list[int]] = []
    for action, *given_ in script:
        match action:
            case "submit":
                length, max_new, session = given_
                context = [(3 * session + i * i) % VOCAB for i in range(length)]
                engine.submit([request(len(contexts), context, max_new=max_new, session=session)])
                contexts.append(context)
            case "step":
                for _ in range(given_[0]):
                    engine.step()
            case "abort":
                engine.abort(given_)
            case "drain":
                listener.drain()
            case "rest":
                engine.sleep()
                engine.wake(model.state_dict(), engine.version)
    heard = listener.run()
    for id, context in enumerate(contexts):
        if heard[id].tokens:
            holds(heard[id], model, context)


def test_a_dense_model_tells_none(path: str) -> None:
    heard = Listener(built_in(path)).run(request(1))[1]
    assert heard.experts == []


def experts_of(context: list[int], heard: Heard, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """As training is given them: for each token, where the one that it predicts says it went."""
    known = torch.tensor(heard.experts).view(-1, *shape)
    before = torch.full((len(context) - 1, *shape), UNKNOWN_EXPERT)
    return torch.cat((before, known, torch.full((1, *shape), UNKNOWN_EXPERT)))[None]


def paired(noise: float, seed: int) -> Decoder:
    """A model of whose pairs of experts a router takes one whole and, of another, either."""
    model = decoder(0, THREE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for index in THREE.sparse_layers:
            router = cast(MoeDecoderLayer, model.layers[index]).experts.router
            router[1::2] = router[::2]
            router.add_(noise * torch.randn(router.shape, generator=generator))
    return model


def test_replayed_experts_give_the_engines_logprobs_under_a_router_that_has_changed(
    path: str,
) -> None:
    engine = built_in(path, config=THREE)
    engine.update_weights(paired(1e-6, seed=1).state_dict(), 1)
    heard = Listener(engine).run(request(1, [3], max_new=100))[1]
    later = paired(1e-6, seed=2)
    free, went = trained(later, [3], heard)
    replayed, _ = trained(later, [3], heard, experts_of([3], heard, THREE.routing_shape))
    told = np.array(heard.experts).reshape(went.shape)
    elsewhere = (np.sort(told) != np.sort(went.numpy())).any((1, 2))
    assert elsewhere.mean() > 0.3
    assert np.abs(np.array(heard.logprobs) - free).max() > 0.1
    np.testing.assert_allclose(heard.logprobs, replayed, atol=1e-4)


def a_flush(ids: list[int], counts: list[int], experts: np.ndarray) -> EngineOutput:
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


def test_flushes_with_experts_and_without_are_joined_and_cut() -> None:
    some = a_flush([1, 2], [2, 1], np.arange(12, dtype=np.int16).reshape(3, 4))
    none = a_flush([3], [2], NO_EXPERTS)
    both = concatenate_outputs(some, none)
    assert both.experts.dtype == np.int16
    assert both.experts.tolist() == [*some.experts.tolist(), *[[UNKNOWN_EXPERT] * 4] * 2]
    assert select_requests(both, np.array([False, True, False])).experts.tolist() == [
        [8, 9, 10, 11]
    ]
    assert len(concatenate_outputs(none, none).experts) == 0
    assert combine_outputs([]) is None
