"""Adapters beside a base: each request computes with its own, whoever shares its batch."""

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
    SCALE,
    TINY,
    Heard,
    Listener,
    adapter,
    built_in,
    decoder,
    request,
    with_adapter,
)
from tests.unit.common.generation.test_builtin_engine import expected_logprobs, words
from tests.unit.common.generation.test_cache_moves import brought, offered

pytestmark = pytest.mark.filterwarnings("error")
PATHS = [pytest.param("native", marks=pytest.mark.needs("compiler")), "graphs"]
GAP = 1e-4  # of log-probabilities to those of the merged model, float32


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(path: str) -> BuiltinEngine:
    """It has adapters `a` (rank 4, all matrices) at version 10, `b` (rank 20, attention) at 20."""
    made = built_in(path, slots=6)
    made.load_adapter("a", adapter(1), SCALE, 10)
    made.load_adapter("b", adapter(2, 20, ATTENTION), SCALE, 20)
    return made


MODELS = {
    "": decoder(),
    "a": with_adapter(adapter(1)),
    "b": with_adapter(adapter(2, 20, ATTENTION)),
}


def is_of(heard: Heard, name: str, context: list[int]) -> None:
    expected = expected_logprobs(MODELS[name], context, heard.tokens)
    np.testing.assert_allclose(heard.logprobs, expected, atol=GAP)


def test_requests_of_one_batch_compute_with_their_own_adapters(engine: BuiltinEngine) -> None:
    names = ["", "a", "b", "a", "", "b", "a", "b", ""]
    contexts = [words(i, 3 + 13 * i) for i in range(len(names))]
    asked = [request(i, contexts[i], max_new=9, adapter=name) for i, name in enumerate(names)]
    heard = Listener(engine).run(*asked)
    for i, name in enumerate(names):
        is_of(heard[i], name, contexts[i])
        assert heard[i].versions == [{"": 0, "a": 10, "b": 20}[name]] * 9


def test_scores_are_those_of_the_merged_model(engine: BuiltinEngine) -> None:
    row = words(5, 70)
    for name, model in MODELS.items():
        scored = engine.score(np.array(row), name)
        np.testing.assert_allclose(scored, expected_logprobs(model, row[:1], row[1:]), atol=GAP)
    assert np.abs(engine.score(np.array(row), "a") - engine.score(np.array(row))).max() > 0.1


def test_a_neighbour_of_another_adapter_changes_no_token(path: str, engine: BuiltinEngine) -> None:
    alone = built_in(path)
    alone.load_adapter("b", adapter(2, 20, ATTENTION), SCALE, 20)
    asked = request(7, [5, 6, 7], max_new=25, adapter="b")
    others = [request(i, [5, 6, 7], max_new=20, adapter="a") for i in range(4)]
    crowd = Listener(engine).run(*others, asked)
    assert crowd[7].tokens == Listener(alone).run(asked)[7].tokens


def test_one_whose_numbers_overflow_spoils_no_neighbour(path: str, engine: BuiltinEngine) -> None:
    far = {name: torch.full_like(one, 3e38) for name, one in adapter(3).items() if name[-1] == "a"}
    huge = adapter(3) | far
    engine.load_adapter("huge", huge, SCALE, 30)
    names = ["b", "huge", "", "a"]
    asked = [request(i, words(i, 20), max_new=9, adapter=name) for i, name in enumerate(names)]
    heard = Listener(engine).run(*asked)
    for i, name in enumerate(names):
        if name != "huge":
            is_of(heard[i], name, words(i, 20))


def test_the_same_context_is_computed_again_for_another_adapter(
    path: str, engine: BuiltinEngine
) -> None:
    context = words(3, 60)
    for i, name in enumerate(["a", "b", "", "a"]):
        heard = Listener(engine).run(request(i, context, max_new=6, adapter=name))
        is_of(heard[i], name, context)
    computed = engine.tokens_computed
    Listener(engine).run(request(9, context, max_new=1, adapter="a"))
    # Its own it shares, but where the slot that had it was the next to be used.
    assert engine.tokens_computed - computed < 60


def test_a_session_that_changes_its_adapter_begins_anew(engine: BuiltinEngine) -> None:
    listener, context = Listener(engine), words(3, 40)
    for turn, name in enumerate(["a", "b", "b", "", "a"]):
        heard = listener.run(request(turn, context, max_new=5, session=1, adapter=name))[turn]
        is_of(heard, name, context)
        context = [*context, *heard.tokens, 1, 2]


def test_a_new_version_holds_for_requests_that_run(engine: BuiltinEngine) -> None:
    listener = Listener(engine)
    engine.submit([request(i, [i, 3], max_new=60, adapter=n) for i, n in enumerate(["a", "b"])])
    for _ in range(20):
        engine.step()
    engine.load_adapter("a", adapter(5, 7), SCALE, 11)
    heard = listener.run()
    before = heard[0].versions.count(10)
    assert 0 < before < 60 and heard[0].versions == [10] * before + [11] * (60 - before)
    assert heard[1].versions == [20] * 60 and engine.adapter_versions == {"a": 11, "b": 20}
    is_of(heard[1], "b", [1, 3])
    fresh = Listener(engine).run(request(5, [0, 3], max_new=9, adapter="a"))[5]
    expected = expected_logprobs(with_adapter(adapter(5, 7)), [0, 3], fresh.tokens)
    np.testing.assert_allclose(fresh.logprobs, expected, atol=GAP)


def test_a_version_of_the_same_ranks_takes_the_place_of_the_one_before(
    engine: BuiltinEngine,
) -> None:
    Listener(engine).run(request(1, max_new=3, adapter="a"), request(2, max_new=3, adapter="b"))
    engine.load_adapter("b", adapter(8, 20, ATTENTION), SCALE, 21)
    row = words(5, 30)
    model = with_adapter(adapter(8, 20, ATTENTION))
    heard = Listener(engine).run(
        request(3, row, max_new=8, adapter="b"), request(4, row, max_new=8, adapter="a")
    )
    expected = expected_logprobs(model, row, heard[3].tokens)
    np.testing.assert_allclose(heard[3].logprobs, expected, atol=GAP)
    is_of(heard[4], "a", row)


def test_adapters_stay_over_sleep_and_over_another_base(engine: BuiltinEngine) -> None:
    listener = Listener(engine)
    engine.submit([request(0, [1, 3], max_new=50, adapter="a")])
    for _ in range(10):
        engine.step()
    engine.sleep()
    engine.wake(decoder(3).state_dict(), 7)
    heard = listener.run(request(1, [4], max_new=9, adapter="a"), request(2, [4], max_new=9))
    assert heard[0].versions == [10] * 50 and heard[2].versions == [7] * 9
    model = with_adapter(adapter(1), seed=3)
    expected = expected_logprobs(model, [4], heard[1].tokens)
    np.testing.assert_allclose(heard[1].logprobs, expected, atol=GAP)
    last = expected_logprobs(model, [1, 3], heard[0].tokens)[-20:]  # all of it was computed again
    np.testing.assert_allclose(heard[0].logprobs[-20:], last, atol=GAP)


def test_one_that_is_in_use_is_not_unloaded(engine: BuiltinEngine) -> None:
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


def test_a_place_that_is_free_again_brings_nothing_of_its_last_adapter(
    engine: BuiltinEngine,
) -> None:
    listener, context = Listener(engine), words(2, 40)
    said = listener.run(request(1, context, max_new=5, session=1, adapter="a"))[1].tokens
    engine.unload_adapter("a")
    engine.load_adapter("c", adapter(5, 7), SCALE, 10)
    context = [*context, *said, 4]
    heard = listener.run(request(2, context, max_new=9, session=1, adapter="c"))[2]
    expected = expected_logprobs(with_adapter(adapter(5, 7)), context, heard.tokens)
    np.testing.assert_allclose(heard.logprobs, expected, atol=GAP)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n != name}


ODD = {
    "no tensors": {},
    "lacks one of its two": without(adapter(1), "layers.1.adapters.k_proj.b"),
    "none of its tensors": {"layers.2.adapters.q_proj.a": torch.zeros(4, 32)},
    r"none of": {"layers.0.adapters.qkv.a": torch.zeros(4, 32)},
    r"in place of \[rank, 32\]": adapter(1) | {"layers.0.adapters.q_proj.a": torch.zeros(4, 33)},
    r"in place of \[32, 5\]": adapter(1) | {"layers.0.adapters.q_proj.a": torch.zeros(5, 32)},
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
@pytest.mark.parametrize("why", ODD)
def test_what_does_not_fit_is_refused_and_changes_nothing(why: str, engine: BuiltinEngine) -> None:
    with pytest.raises(Refused, match=why):
        engine.load_adapter("a", ODD[why], SCALE, 11)
    assert engine.adapter_versions == {"a": 10, "b": 20}
    heard = Listener(engine).run(request(1, [3, 4], max_new=5, adapter="a"))[1]
    is_of(heard, "a", [3, 4])


def test_an_engine_has_so_many_places_and_no_more() -> None:
    engine = built_in("eager")
    for i in range(MAX_ADAPTERS):
        engine.load_adapter(f"{i}", adapter(i, 1, ["o_proj"]), SCALE, i)
    with pytest.raises(Refused, match="has no place"):
        engine.load_adapter("more", adapter(1, 1, ["o_proj"]), SCALE, 0)
    engine.unload_adapter("7")
    engine.load_adapter("more", adapter(1, 1, ["o_proj"]), SCALE, 0)
    with pytest.raises(Refused, match="'' has no place"):
        engine.load_adapter("", adapter(1, 1, ["o_proj"]), SCALE, 0)


def test_a_session_moves_with_the_name_of_its_adapter(path: str, engine: BuiltinEngine) -> None:
    context = words(2, 45)
    said = Listener(engine).run(request(1, context, max_new=5, session=1, adapter="a"))[1].tokens
    cache = engine.describe_session_cache(1)
    assert cache is not None and (cache.adapter, cache.version) == ("a", 10)
    target = built_in(path)
    assert offered(cache, target, alone=False, session=1) is None
    target.load_adapter("b", adapter(2, 20, ATTENTION), SCALE, 20)
    assert offered(cache, target, alone=False, session=1) is None
    target.load_adapter("a", adapter(1), SCALE, 10)
    load = offered(cache, target, alone=False, session=1)
    assert load is not None
    brought(engine, load, [0], session=1)
    context = [*context, *said, 4]
    heard = Listener(target).run(request(2, context, max_new=9, session=1, adapter="a"))[2]
    is_of(heard, "a", context)
    assert heard.finish == [FinishReason.LENGTH] and target.tokens_computed < 45


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_narrow_weights_stay_near_the_merged_model(path: str, dtype: str) -> None:
    engine = built_in(path, dtype=dtype)
    engine.load_adapter("a", adapter(1), SCALE, 10)
    row = words(5, 60)
    scored = engine.score(np.array(row), "a")
    expected = expected_logprobs(MODELS["a"], row[:1], row[1:])
    assert np.abs(scored - expected).mean() < 0.06
    assert np.abs(expected_logprobs(MODELS[""], row[:1], row[1:]) - expected).mean() > 0.2


def test_attention_of_a_mixture_of_experts_takes_adapters(path: str) -> None:
    engine = built_in(path, config=MOE)
    tensors = adapter(1, 4, ATTENTION, MOE)
    engine.load_adapter("a", tensors, SCALE, 10)
    row = words(5, 40)
    expected = expected_logprobs(with_adapter(tensors, config=MOE), row[:1], row[1:])
    np.testing.assert_allclose(engine.score(np.array(row), "a"), expected, atol=GAP)
    with pytest.raises(Refused, match="mixture of experts"):
        engine.load_adapter("b", adapter(1, 4, ["q_proj"]) | down(0), SCALE, 0)


def down(layer: int) -> dict[str, torch.Tensor]:
    shapes = {"a": (4, TINY.ffn_size), "b": (TINY.hidden_size, 4)}
    return {f"layers.{layer}.adapters.down_proj.{f}": torch.zeros(s) for f, s in shapes.items()}
