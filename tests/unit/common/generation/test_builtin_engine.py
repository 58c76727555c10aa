"""The built-in engine on every path: it computes what the model gives, however it batches."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.generation.backends.native import NativeCompute
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.engine import EngineOptions
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.hardware.gpus.gpu_requirement import GpuUnusable
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.library_build import COMPILER_FLAGS, COMPILERS, SOURCE_DIRECTORY, Library
from tests.attention import causal_attention
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import (
    TINY,
    VOCAB,
    Heard,
    Listener,
    built_in,
    decoder,
    request,
)

TARGETS = {"x86_64": ("haswell", "x86-64-v2"), "aarch64": ("armv8-a",)}.get(platform.machine(), ())
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")


def expected_logprobs(model: Decoder, context: list[int], new: list[int], temperature: float = 1.0):  # type: ignore[no-untyped-def]
    row = torch.tensor([*context, *new])
    found = _logprobs(model, row, temperature)[len(context) - 1 : -1]
    return found.gather(1, row[len(context) :, None]).flatten().numpy()


def next_logprobs(model: Decoder, context: list[int], temperature: float = 1.0) -> np.ndarray:
    """Of every token that may come next."""
    found: np.ndarray = _logprobs(model, torch.tensor(context), temperature)[-1].numpy()
    return found


def _logprobs(model: Decoder, row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Behind each token of a row, of every token that may come next."""
    with torch.inference_mode():
        places = torch.arange(len(row)).unsqueeze(0)
        hidden = model(row.unsqueeze(0), places, causal_attention)
        return (model.compute_logits(hidden)[0] / temperature).log_softmax(-1)


def holds(heard: Heard, model: Decoder, context: list[int], temperature: float = 1.0) -> None:
    expected = expected_logprobs(model, context, heard.tokens, temperature)
    np.testing.assert_allclose(heard.logprobs, expected, atol=2e-4)


Make = Callable[..., BuiltinEngine]


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.needs("compiler")), "graphs"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(built_in, request.param)


def words(seed: int, count: int) -> list[int]:
    made: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return made


@pytest.mark.rotating(3)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_are_those_of_the_sampling_distribution(make: Make, temperature: float) -> None:
    model = decoder()
    heard = Listener(make()).run(
        request(1, [4, 5], temperature=temperature, max_new=30),
        request(2, [9], max_new=12),
    )
    holds(heard[1], model, [4, 5], temperature)
    holds(heard[2], model, [9])


def test_greedy_takes_the_most_likely_token(make: Make) -> None:
    model = decoder()
    heard = Listener(make()).run(
        request(1, [4, 5], temperature=0), request(2, [4, 5], temperature=1)
    )[1]
    row = torch.tensor([[4, 5, *heard.tokens]])
    with torch.inference_mode():
        hidden = model(row, torch.arange(row.shape[1]).unsqueeze(0), causal_attention)
        likeliest = model.compute_logits(hidden)[0, 1:-1].argmax(-1)
    assert likeliest.tolist() == heard.tokens
    holds(heard, model, [4, 5])


@pytest.mark.rotating(3)
def test_tokens_are_sampled_as_often_as_they_are_likely(make: Make) -> None:
    engine = make(slots=64)
    heard = Listener(engine).run(*(request(i, [3, 8], max_new=1) for i in range(4000)))
    counts = np.bincount([h.tokens[0] for h in heard.values()], minlength=VOCAB)
    probability = np.exp(next_logprobs(decoder(), [3, 8]))
    likely = probability * 4000 > 5
    chi2 = ((counts - probability * 4000) ** 2 / (probability * 4000))[likely].sum()
    assert likely.sum() > 5
    assert chi2 < 2.5 * likely.sum()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("length", [2, 7, 33, 70, 100])
def test_a_context_of_any_length_gives_the_models_logprobs(make: Make, length: int) -> None:
    context = words(length, length)
    holds(Listener(make()).run(request(1, context))[1], decoder(), context)


def test_a_long_context_is_computed_in_several_steps(make: Make) -> None:
    context = words(1, 600)
    engine = make(slots=2, max_length=700)
    engine.submit([request(1, context, max_new=3)])
    engine.step()
    assert engine.tokens_generated == 0
    holds(Listener(engine).run()[1], decoder(), context)


def test_many_lengths_at_once_are_right_in_every_slot(make: Make) -> None:
    contexts = {i: words(i, 1 + 7 * i % 90) for i in range(20)}
    heard = Listener(make(slots=6)).run(
        *(request(i, context, max_new=5 + 3 * i % 17) for i, context in contexts.items())
    )
    for i, context in contexts.items():
        holds(heard[i], decoder(), context)


@pytest.mark.parametrize("length", [9, 50])
def test_a_groups_shared_prompt_is_computed_once(make: Make, length: int) -> None:
    context = words(3, length)
    engine = make(slots=8)
    computed = engine.tokens_computed
    heard = Listener(engine).run(*(request(i, context, max_new=1) for i in range(8)))
    for h in heard.values():
        holds(h, decoder(), context)
    assert engine.tokens_computed - computed <= (length - 1) + 8


def test_the_next_turn_of_a_session_runs_only_what_is_new(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    context = words(5, 20)
    first = listener.run(request(1, context, session=3, max_new=6))[1].tokens
    computed = engine.tokens_computed
    context = context + first + [7, 8]
    heard = listener.run(request(2, context, session=3, max_new=4))[2]
    assert (
        engine.tokens_computed - computed == 1 + 2 + 3
    )  # the last sampled token, the result, and what is sampled
    holds(heard, decoder(), context)


def test_a_session_that_turns_elsewhere_keeps_what_is_common(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    context = words(5, 40)
    listener.run(request(1, context, session=3, max_new=6))
    context = context[:20] + words(6, 5)
    computed = engine.tokens_computed
    heard = listener.run(request(2, context, session=3, max_new=1))[2]
    assert engine.tokens_computed - computed == 5
    holds(heard, decoder(), context)


def two_sessions(engine: BuiltinEngine) -> tuple[Listener, dict[int, list[int]]]:
    """Sessions 1 and 2 after a turn each, and what they hold."""
    listener, grown = Listener(engine), {}
    for session in (1, 2):
        context = words(session, 10)
        new = listener.run(request(session, context, session=session, max_new=3))[session].tokens
        grown[session] = context + new
    return listener, grown


def test_the_session_idle_for_longest_makes_room() -> None:
    engine = built_in("eager", slots=2)
    listener, grown = two_sessions(engine)
    listener.run(request(10, session=50, max_new=2))
    computed = engine.tokens_computed
    heard = listener.run(request(12, grown[2], session=2, max_new=1))
    assert engine.tokens_computed - computed == 1
    heard = listener.run(request(11, grown[1], session=1, max_new=1))
    assert engine.tokens_computed - computed > 1 + 1, "it has lost its slot"
    holds(heard[11], decoder(), grown[1])


def test_a_released_session_frees_its_slot_first(make: Make) -> None:
    engine = make(slots=2)
    listener, grown = two_sessions(engine)
    engine.release_sessions([2])
    listener.run(request(10, session=-1, max_new=2))
    computed = engine.tokens_computed
    listener.run(request(11, grown[1], session=1, max_new=1))
    assert engine.tokens_computed - computed == 1


@pytest.mark.rotating(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("after", [1, 9, 20])
def test_a_request_goes_on_elsewhere_as_it_would_have_here(
    make: Make, after: int, temperature: float
) -> None:
    context = words(2, 11)
    whole = Listener(make()).run(request(1, context, max_new=30, seed=77, temperature=temperature))[
        1
    ]
    rest = Listener(make(slots=7)).run(
        *(request(i, words(i, 9)) for i in range(2, 5)),
        request(
            9,
            context + whole.tokens[:after],
            max_new=30 - after,
            seed=77,
            temperature=temperature,
        ),
    )[9]
    assert rest.tokens == whole.tokens[after:]
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[after:], atol=2e-4)


def test_after_a_swap_new_requests_see_only_the_new_weights(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    context = words(1, 40)
    listener.run(request(1, context, session=4, max_new=5))
    engine.submit([request(2, context, max_new=30)])  # its prompt lies in a cache
    engine.step()
    engine.update_weights(decoder(1).state_dict(), 1)
    heard = listener.run(request(3, context, max_new=5), request(4, words(2, 5), max_new=5))
    holds(heard[3], decoder(1), context)
    holds(heard[4], decoder(1), words(2, 5))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("length", [6, 600])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_tokens_all_of_one_version_follow_a_prefix_of_that_version(
    make: Make, steps: int, length: int
) -> None:
    """A swap while the prompt is being computed starts it anew: no token would show the mixture."""
    context = words(1, length)
    engine = make(max_length=700)
    engine.submit([request(1, context, max_new=8)])
    for _ in range(steps):
        engine.step()
    old = engine.tokens_generated
    engine.update_weights(decoder(1).state_dict(), 1)
    heard = Listener(engine).run()[1]
    assert heard.versions == [0] * old + [1] * (8 - old)
    if not old:
        holds(heard, decoder(1), context)


def test_keep_goes_on_over_old_keys_and_recompute_does_not(make: Make) -> None:
    context = words(1, 12)
    mixed = {}
    for mode in ("keep", "recompute"):
        engine = make(kv_on_update=mode)
        engine.submit([request(1, context, max_new=20)])
        while engine.tokens_generated < 10:
            engine.step()
        engine.update_weights(decoder(1).state_dict(), 1)
        mixed[mode] = Listener(engine).run()[1]
        assert mixed[mode].versions == [0] * 10 + [1] * 10
    heard = mixed["recompute"]
    expected = expected_logprobs(decoder(1), context + heard.tokens[:10], heard.tokens[10:])
    np.testing.assert_allclose(heard.logprobs[10:], expected, atol=2e-4)
    assert abs(np.array(mixed["keep"].logprobs[10]) - expected[0]) > 1e-3


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_weights_of_another_model_are_refused_and_nothing_changes(make: Make, change: str) -> None:
    engine = make()
    state = decoder(1).state_dict()
    norm = state.pop("final_norm")
    if change == "misshapen":
        state["final_norm"] = norm[:1]  # would broadcast
    with pytest.raises(Refused, match="final_norm"):
        engine.update_weights(state, 1)
    assert engine.version == 0
    holds(Listener(engine).run(request(1))[1], decoder(), [1, 2, 3])


def test_scoring_agrees_with_generating(make: Make) -> None:
    engine = make()
    heard = Listener(engine).run(request(1, [4, 5, 6], max_new=20))[1]
    scored = engine.score(np.array([4, 5, 6, *heard.tokens]))
    assert scored.shape == (22,) and scored.dtype == np.float32
    np.testing.assert_allclose(scored[2:], heard.logprobs, atol=2e-4)


def test_slots_longer_than_the_model_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="positions"):
        make(max_length=1025)


@pytest.mark.rotating(4)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("storage", ["float", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_it_computes_what_the_model_says(target: str, storage: str, tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    path = tmp_path / "decoder.so"
    flags = [flag for flag in COMPILER_FLAGS if not flag.startswith(("-O", "-march"))]
    more = ["-Og", f"-march={target}", f"-DMESHRL_STORAGE={storage}"]
    command = [compiler, *flags, *more, str(SOURCE_DIRECTORY / "decoder.cpp"), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=scaled(100))
    slots = Slots(4, 256)
    compute = NativeCompute(Library(path), TINY, slots, 80)
    memory = PagedCache(slots, 80, compute.copy_block)
    compute.attach_block_table(memory.block_table)
    engine = BuiltinEngine(slots, compute, memory, TINY, target, EngineOptions())
    engine.wake(decoder().state_dict(), 0)
    contexts = {i: words(i, 3 + 45 * i) for i in range(5)}
    heard = Listener(engine).run(*(request(i, c, max_new=20) for i, c in contexts.items()))
    for i, context in contexts.items():
        if storage == "float":
            holds(heard[i], decoder(), context)
        else:
            scored = engine.score(np.array([*context, *heard[i].tokens]))[len(context) - 1 :]
            np.testing.assert_allclose(heard[i].logprobs, scored, atol=1e-3)


@no_gpu
@pytest.mark.parametrize("path", ["auto", "graphs"])
def test_without_its_gpu_an_engine_is_refused_and_does_not_decode_on_the_cpu(path: str) -> None:
    with pytest.raises(
        GpuUnusable, match=r"the engine cannot compute on a GPU: torch .* built "
    ) as told:
        build_engine(TINY, 2, 64, backend=path, device="cuda")
    assert told.value.where == "mesh.device" and "--device cpu" in told.value.fix


def test_the_cpu_is_taken_beside_a_gpu_where_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_engine(TINY, 2, 64, backend="eager", device="cuda")
    assert engine.backend == "torch eager, float32 (asked for)"
    assert "decodes on the CPU of a worker with a GPU" in caplog.text


def test_a_worker_of_the_cpu_computes_there_whatever_the_host_has() -> None:
    assert build_engine(TINY, 2, 64, backend="graphs").backend == "graphs, float32, cpu"
