"""Adapters beside a base model: each request of a batch computes with its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import Refused
from meshrl.common.generation.batch.adapter_deltas import MAX_ADAPTERS
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine
from tests.unit.common.generation.engines_under_test import (
    ATTENTION,
    MOE,
    PATHS,
    SCALE,
    TINY,
    CollectedOutput,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
    with_adapter,
)
from tests.unit.common.generation.test_builtin_engine import expected_logprobs, words
from tests.unit.common.generation.test_cache_moves import add_chunks, offer

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning")
GAP = 1e-4  # greatest difference of log-probabilities to the merged model in float32


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(path: str) -> BuiltinEngine:
    """Return an engine with adapters `a` (rank 4) at version 10 and `b` (rank 20) at version 20."""
    new_engine = built_in(path, slots=6)
    new_engine.load_adapter("a", adapter(1), SCALE, 10)
    new_engine.load_adapter("b", adapter(2, 20, ATTENTION), SCALE, 20)
    return new_engine


MODELS = {
    "": decoder(),
    "a": with_adapter(adapter(1)),
    "b": with_adapter(adapter(2, 20, ATTENTION)),
}


def assert_computed_by(output: CollectedOutput, name: str, context: list[int]) -> None:
    expected = expected_logprobs(MODELS[name], context, output.tokens)
    np.testing.assert_allclose(output.logprobs, expected, atol=GAP)


def test_requests_of_one_batch_compute_with_their_own_adapters(engine: BuiltinEngine) -> None:
    names = ["", "a", "b", "a", "", "b", "a", "b", ""]
    contexts = [words(i, 3 + 13 * i) for i in range(len(names))]
    requests = [request(i, contexts[i], max_new=9, adapter=name) for i, name in enumerate(names)]
    outputs = Listener(engine).run(*requests)
    for i, name in enumerate(names):
        assert_computed_by(outputs[i], name, contexts[i])
        assert outputs[i].versions == [{"": 0, "a": 10, "b": 20}[name]] * 9


def test_scores_are_those_of_the_merged_model(engine: BuiltinEngine) -> None:
    row = words(5, 70)
    for name, model in MODELS.items():
        scored = engine.score(np.array(row), name)
        np.testing.assert_allclose(scored, expected_logprobs(model, row[:1], row[1:]), atol=GAP)
    assert np.abs(engine.score(np.array(row), "a") - engine.score(np.array(row))).max() > 0.1


def test_other_adapters_in_the_batch_change_no_token(path: str, engine: BuiltinEngine) -> None:
    single_engine = built_in(path)
    single_engine.load_adapter("b", adapter(2, 20, ATTENTION), SCALE, 20)
    own_request = request(7, [5, 6, 7], max_new=25, adapter="b")
    others = [request(i, [5, 6, 7], max_new=20, adapter="a") for i in range(4)]
    mixed_outputs = Listener(engine).run(*others, own_request)
    assert mixed_outputs[7].tokens == Listener(single_engine).run(own_request)[7].tokens


def test_overflowing_adapter_does_not_affect_other_requests(
    path: str, engine: BuiltinEngine
) -> None:
    huge_factors = {
        name: torch.full_like(one, 3e38) for name, one in adapter(3).items() if name[-1] == "a"
    }
    huge = adapter(3) | huge_factors
    engine.load_adapter("huge", huge, SCALE, 30)
    names = ["b", "huge", "", "a"]
    requests = [request(i, words(i, 20), max_new=9, adapter=name) for i, name in enumerate(names)]
    outputs = Listener(engine).run(*requests)
    for i, name in enumerate(names):
        if name != "huge":
            assert_computed_by(outputs[i], name, words(i, 20))


def test_prefix_cache_is_not_shared_between_adapters(path: str, engine: BuiltinEngine) -> None:
    context = words(3, 60)
    for i, name in enumerate(["a", "b", "", "a"]):
        output = Listener(engine).run(request(i, context, max_new=6, adapter=name))
        assert_computed_by(output[i], name, context)
    computed = engine.tokens_computed
    Listener(engine).run(request(9, context, max_new=1, adapter="a"))
    # The request shares its own prefix, unless its slot was evicted first.
    assert engine.tokens_computed - computed < 60


def test_session_that_changes_its_adapter_recomputes_its_context(engine: BuiltinEngine) -> None:
    listener, context = Listener(engine), words(3, 40)
    for turn, name in enumerate(["a", "b", "b", "", "a"]):
        output = listener.run(request(turn, context, max_new=5, session=1, adapter=name))[turn]
        assert_computed_by(output, name, context)
        context = [*context, *output.tokens, 1, 2]


def test_new_adapter_version_applies_to_running_requests(engine: BuiltinEngine) -> None:
    listener = Listener(engine)
    engine.submit([request(i, [i, 3], max_new=60, adapter=n) for i, n in enumerate(["a", "b"])])
    for _ in range(20):
        engine.step()
    engine.load_adapter("a", adapter(5, 7), SCALE, 11)
    outputs = listener.run()
    old_count = outputs[0].versions.count(10)
    assert 0 < old_count < 60 and outputs[0].versions == [10] * old_count + [11] * (60 - old_count)
    assert outputs[1].versions == [20] * 60 and engine.adapter_versions == {"a": 11, "b": 20}
    assert_computed_by(outputs[1], "b", [1, 3])
    later_output = Listener(engine).run(request(5, [0, 3], max_new=9, adapter="a"))[5]
    expected = expected_logprobs(with_adapter(adapter(5, 7)), [0, 3], later_output.tokens)
    np.testing.assert_allclose(later_output.logprobs, expected, atol=GAP)


def test_new_version_of_the_same_rank_replaces_the_previous_one(
    engine: BuiltinEngine,
) -> None:
    Listener(engine).run(request(1, max_new=3, adapter="a"), request(2, max_new=3, adapter="b"))
    engine.load_adapter("b", adapter(8, 20, ATTENTION), SCALE, 21)
    row = words(5, 30)
    model = with_adapter(adapter(8, 20, ATTENTION))
    outputs = Listener(engine).run(
        request(3, row, max_new=8, adapter="b"), request(4, row, max_new=8, adapter="a")
    )
    expected = expected_logprobs(model, row, outputs[3].tokens)
    np.testing.assert_allclose(outputs[3].logprobs, expected, atol=GAP)
    assert_computed_by(outputs[4], "a", row)


def test_adapters_survive_sleep_and_a_new_base(engine: BuiltinEngine) -> None:
    listener = Listener(engine)
    engine.submit([request(0, [1, 3], max_new=50, adapter="a")])
    for _ in range(10):
        engine.step()
    engine.sleep()
    engine.wake(decoder(3).state_dict(), 7)
    outputs = listener.run(request(1, [4], max_new=9, adapter="a"), request(2, [4], max_new=9))
    assert outputs[0].versions == [10] * 50 and outputs[2].versions == [7] * 9
    model = with_adapter(adapter(1), seed=3)
    expected = expected_logprobs(model, [4], outputs[1].tokens)
    np.testing.assert_allclose(outputs[1].logprobs, expected, atol=GAP)
    # the whole context was recomputed
    last = expected_logprobs(model, [1, 3], outputs[0].tokens)[-20:]
    np.testing.assert_allclose(outputs[0].logprobs[-20:], last, atol=GAP)


def test_adapter_in_use_is_not_unloaded(engine: BuiltinEngine) -> None:
    engine.submit([request(i, max_new=30, adapter="a", session=i) for i in range(9)])
    engine.step()
    with pytest.raises(Refused, match="in use"):
        engine.unload_adapter("a")
    engine.abort(range(9))
    engine.unload_adapter("a")
    engine.unload_adapter("a")
    assert engine.adapter_versions == {"b": 20}
    with pytest.raises(Refused, match="'a' is not loaded"):
        engine.submit([request(1, adapter="a")])
    with pytest.raises(Refused, match="'a' is not loaded"):
        engine.score(np.array([1, 2]), "a")


def test_reused_adapter_slot_keeps_nothing_of_its_last_adapter(
    engine: BuiltinEngine,
) -> None:
    listener, context = Listener(engine), words(2, 40)
    tokens = listener.run(request(1, context, max_new=5, session=1, adapter="a"))[1].tokens
    engine.unload_adapter("a")
    engine.load_adapter("c", adapter(5, 7), SCALE, 10)
    context = [*context, *tokens, 4]
    output = listener.run(request(2, context, max_new=9, session=1, adapter="c"))[2]
    expected = expected_logprobs(with_adapter(adapter(5, 7)), context, output.tokens)
    np.testing.assert_allclose(output.logprobs, expected, atol=GAP)


def remove_tensor(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n != name}


INVALID_TENSORS = {
    "no tensors": {},
    "has only one of its two": remove_tensor(adapter(1), "layers.1.adapters.k_proj.b"),
    "the model has no tensor": {"layers.2.adapters.q_proj.a": torch.zeros(4, 32)},
    "model has no tensor": {"layers.0.adapters.qkv.a": torch.zeros(4, 32)},
    r"instead of \[rank, 32\]": adapter(1) | {"layers.0.adapters.q_proj.a": torch.zeros(4, 33)},
    r"instead of \[32, 5\]": adapter(1) | {"layers.0.adapters.q_proj.a": torch.zeros(5, 32)},
    "embedding": {"embedding": torch.zeros(40, 32)},
    "q_proj is not finite": adapter(1)
    | {"layers.0.adapters.q_proj.a": torch.full((4, 32), torch.nan)},
    "k_proj is not finite": adapter(1)
    | {
        "layers.1.adapters.k_proj.b": torch.full_like(
            adapter(1)["layers.1.adapters.k_proj.b"], torch.inf
        )
    },
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("message", INVALID_TENSORS)
def test_invalid_adapter_is_rejected_without_effect(message: str, engine: BuiltinEngine) -> None:
    with pytest.raises(Refused, match=message):
        engine.load_adapter("a", INVALID_TENSORS[message], SCALE, 11)
    assert engine.adapter_versions == {"a": 10, "b": 20}
    output = Listener(engine).run(request(1, [3, 4], max_new=5, adapter="a"))[1]
    assert_computed_by(output, "a", [3, 4])


def test_number_of_adapters_is_bounded() -> None:
    engine = built_in("eager")
    for i in range(MAX_ADAPTERS):
        engine.load_adapter(f"{i}", adapter(i, 1, ["o_proj"]), SCALE, i)
    with pytest.raises(Refused, match="does not fit"):
        engine.load_adapter("more", adapter(1, 1, ["o_proj"]), SCALE, 0)
    engine.unload_adapter("7")
    engine.load_adapter("more", adapter(1, 1, ["o_proj"]), SCALE, 0)
    with pytest.raises(Refused, match="'' does not fit"):
        engine.load_adapter("", adapter(1, 1, ["o_proj"]), SCALE, 0)


def test_session_moves_with_the_name_of_its_adapter(path: str, engine: BuiltinEngine) -> None:
    context = words(2, 45)
    tokens = Listener(engine).run(request(1, context, max_new=5, session=1, adapter="a"))[1].tokens
    cache = engine.describe_session_cache(1)
    assert cache is not None and (cache.adapter, cache.version) == ("a", 10)
    target = built_in(path)
    assert offer(cache, target, is_front_first=False, session=1) is None
    target.load_adapter("b", adapter(2, 20, ATTENTION), SCALE, 20)
    assert offer(cache, target, is_front_first=False, session=1) is None
    target.load_adapter("a", adapter(1), SCALE, 10)
    load = offer(cache, target, is_front_first=False, session=1)
    assert load is not None
    add_chunks(engine, load, [0], session=1)
    context = [*context, *tokens, 4]
    output = Listener(target).run(request(2, context, max_new=9, session=1, adapter="a"))[2]
    assert_computed_by(output, "a", context)
    assert output.finish == [FinishReason.LENGTH] and target.tokens_computed < 45


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_bfloat16_weights_stay_near_the_merged_model(path: str, dtype: str) -> None:
    engine = built_in(path, dtype=dtype)
    engine.load_adapter("a", adapter(1), SCALE, 10)
    row = words(5, 60)
    scored = engine.score(np.array(row), "a")
    expected = expected_logprobs(MODELS["a"], row[:1], row[1:])
    assert np.abs(scored - expected).mean() < 0.06
    assert np.abs(expected_logprobs(MODELS[""], row[:1], row[1:]) - expected).mean() > 0.2


def test_attention_of_a_moe_model_supports_adapters(path: str) -> None:
    engine = built_in(path, config=MOE)
    tensors = adapter(1, 4, ATTENTION, MOE)
    engine.load_adapter("a", tensors, SCALE, 10)
    row = words(5, 40)
    expected = expected_logprobs(with_adapter(tensors, config=MOE), row[:1], row[1:])
    np.testing.assert_allclose(engine.score(np.array(row), "a"), expected, atol=GAP)
    with pytest.raises(Refused, match="MoE layer"):
        engine.load_adapter("b", adapter(1, 4, ["q_proj"]) | make_down_factors(0), SCALE, 0)


def make_down_factors(layer: int) -> dict[str, torch.Tensor]:
    shapes = {"a": (4, TINY.ffn_size), "b": (TINY.hidden_size, 4)}
    return {f"layers.{layer}.adapters.down_proj.{f}": torch.zeros(s) for f, s in shapes.items()}
