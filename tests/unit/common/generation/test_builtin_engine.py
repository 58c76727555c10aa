"""Built-in engine on every backend: the model's log-probabilities for any batch."""

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
from meshrl.common.generation.batch.cache_size import CachePlan
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.engine import EngineOptions
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.hardware.gpus.gpu_requirement import GpuUnusable
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.library_build import COMPILER_FLAGS, COMPILERS, SOURCE_DIRECTORY, Library
from tests.attention import causal_attention
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import (
    PATHS,
    TINY,
    VOCAB,
    CollectedOutput,
    Listener,
    built_in,
    decoder,
    request,
)

TARGETS = {"x86_64": ("haswell", "x86-64-v2"), "aarch64": ("armv8-a",)}.get(platform.machine(), ())
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")


def expected_logprobs(model: Decoder, context: list[int], new: list[int], temperature: float = 1.0):  # type: ignore[no-untyped-def]
    row = torch.tensor([*context, *new])
    logprobs = _logprobs(model, row, temperature)[len(context) - 1 : -1]
    return logprobs.gather(1, row[len(context) :, None]).flatten().numpy()


def next_logprobs(model: Decoder, context: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the log-probabilities of every possible next token."""
    logprobs: np.ndarray = _logprobs(model, torch.tensor(context), temperature)[-1].numpy()
    return logprobs


def next_logits(model: Decoder, context: list[int]) -> np.ndarray:
    """Return the logits of every possible next token."""
    logits: np.ndarray = _logits(model, torch.tensor(context))[-1].numpy()
    return logits


def _logprobs(model: Decoder, row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of every possible next token at each position of a row."""
    return (_logits(model, row) / temperature).log_softmax(-1)


@torch.inference_mode()
def _logits(model: Decoder, row: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(row)).unsqueeze(0)
    hidden = model(row.unsqueeze(0), positions, causal_attention)
    logits: torch.Tensor = model.compute_logits(hidden)[0]
    return logits


def assert_matches_model(
    output: CollectedOutput, model: Decoder, context: list[int], temperature: float = 1.0
) -> None:
    expected = expected_logprobs(model, context, output.tokens, temperature)
    np.testing.assert_allclose(output.logprobs, expected, atol=2e-4)


Make = Callable[..., BuiltinEngine]


@pytest.fixture(params=PATHS)
def make(request: pytest.FixtureRequest) -> Make:
    return partial(built_in, request.param)


def words(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


@pytest.mark.rotating(3)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_are_those_of_the_sampling_distribution(make: Make, temperature: float) -> None:
    model = decoder()
    outputs = Listener(make()).run(
        request(1, [4, 5], temperature=temperature, max_new=30),
        request(2, [9], max_new=12),
    )
    assert_matches_model(outputs[1], model, [4, 5], temperature)
    assert_matches_model(outputs[2], model, [9])


def test_greedy_sampling_takes_the_most_likely_token(make: Make) -> None:
    model = decoder()
    output = Listener(make()).run(
        request(1, [4, 5], temperature=0), request(2, [4, 5], temperature=1)
    )[1]
    row = torch.tensor([[4, 5, *output.tokens]])
    with torch.inference_mode():
        hidden = model(row, torch.arange(row.shape[1]).unsqueeze(0), causal_attention)
        likeliest = model.compute_logits(hidden)[0, 1:-1].argmax(-1)
    assert likeliest.tolist() == output.tokens
    assert_matches_model(output, model, [4, 5])


@pytest.mark.rotating(3)
def test_tokens_are_sampled_by_their_probability(make: Make) -> None:
    engine = make(slots=64)
    outputs = Listener(engine).run(*(request(i, [3, 8], max_new=1) for i in range(4000)))
    counts = np.bincount([h.tokens[0] for h in outputs.values()], minlength=VOCAB)
    probability = np.exp(next_logprobs(decoder(), [3, 8]))
    likely = probability * 4000 > 5
    chi2 = ((counts - probability * 4000) ** 2 / (probability * 4000))[likely].sum()
    assert likely.sum() > 5
    assert chi2 < 2.5 * likely.sum()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("length", [2, 7, 33, 70, 100])
def test_context_of_any_length_gives_the_models_logprobs(make: Make, length: int) -> None:
    context = words(length, length)
    assert_matches_model(Listener(make()).run(request(1, context))[1], decoder(), context)


def test_long_context_is_computed_in_several_steps(make: Make) -> None:
    context = words(1, 600)
    engine = make(slots=2, max_length=700)
    engine.submit([request(1, context, max_new=3)])
    engine.step()
    assert engine.tokens_generated == 0
    assert_matches_model(Listener(engine).run()[1], decoder(), context)


def test_mixed_lengths_are_correct_in_every_slot(make: Make) -> None:
    contexts = {i: words(i, 1 + 7 * i % 90) for i in range(20)}
    outputs = Listener(make(slots=6)).run(
        *(request(i, context, max_new=5 + 3 * i % 17) for i, context in contexts.items())
    )
    for i, context in contexts.items():
        assert_matches_model(outputs[i], decoder(), context)


@pytest.mark.parametrize("length", [9, 50])
def test_shared_prompt_of_a_group_is_computed_once(make: Make, length: int) -> None:
    context = words(3, length)
    engine = make(slots=8)
    count_before = engine.tokens_computed
    outputs = Listener(engine).run(*(request(i, context, max_new=1) for i in range(8)))
    for h in outputs.values():
        assert_matches_model(h, decoder(), context)
    assert engine.tokens_computed - count_before <= (length - 1) + 8


def test_next_turn_of_a_session_computes_only_new_tokens(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    context = words(5, 20)
    first = listener.run(request(1, context, session=3, max_new=6))[1].tokens
    count_before = engine.tokens_computed
    context = context + first + [7, 8]
    output = listener.run(request(2, context, session=3, max_new=4))[2]
    # the last sampled token, the tool's result and the new tokens
    assert engine.tokens_computed - count_before == 1 + 2 + 3
    assert_matches_model(output, decoder(), context)


def test_session_that_diverges_keeps_the_common_prefix(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    context = words(5, 40)
    listener.run(request(1, context, session=3, max_new=6))
    context = context[:20] + words(6, 5)
    count_before = engine.tokens_computed
    output = listener.run(request(2, context, session=3, max_new=1))[2]
    assert engine.tokens_computed - count_before == 5
    assert_matches_model(output, decoder(), context)


def run_two_sessions(engine: BuiltinEngine) -> tuple[Listener, dict[int, list[int]]]:
    """Run a turn of sessions 1 and 2; return the listener and the contexts."""
    listener, contexts = Listener(engine), {}
    for session in (1, 2):
        context = words(session, 10)
        new = listener.run(request(session, context, session=session, max_new=3))[session].tokens
        contexts[session] = context + new
    return listener, contexts


def test_longest_idle_session_is_evicted() -> None:
    engine = built_in("eager", slots=2)
    listener, contexts = run_two_sessions(engine)
    listener.run(request(10, session=50, max_new=2))
    count_before = engine.tokens_computed
    outputs = listener.run(request(12, contexts[2], session=2, max_new=1))
    assert engine.tokens_computed - count_before == 1
    outputs = listener.run(request(11, contexts[1], session=1, max_new=1))
    assert engine.tokens_computed - count_before > 1 + 1, "the session has lost its slot"
    assert_matches_model(outputs[11], decoder(), contexts[1])


def test_slot_of_a_released_session_is_reused_first(make: Make) -> None:
    engine = make(slots=2)
    listener, contexts = run_two_sessions(engine)
    engine.release_sessions([2])
    listener.run(request(10, session=-1, max_new=2))
    count_before = engine.tokens_computed
    listener.run(request(11, contexts[1], session=1, max_new=1))
    assert engine.tokens_computed - count_before == 1


@pytest.mark.rotating(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("after", [1, 9, 20])
def test_request_continues_identically_on_another_engine(
    make: Make, after: int, temperature: float
) -> None:
    context = words(2, 11)
    expected = Listener(make()).run(
        request(1, context, max_new=30, seed=77, temperature=temperature)
    )[1]
    continued = Listener(make(slots=7)).run(
        *(request(i, words(i, 9)) for i in range(2, 5)),
        request(
            9,
            context + expected.tokens[:after],
            max_new=30 - after,
            seed=77,
            temperature=temperature,
        ),
    )[9]
    assert continued.tokens == expected.tokens[after:]
    np.testing.assert_allclose(continued.logprobs, expected.logprobs[after:], atol=2e-4)


def test_new_requests_use_only_the_new_weights_after_a_swap(make: Make) -> None:
    engine = make()
    listener = Listener(engine)
    context = words(1, 40)
    listener.run(request(1, context, session=4, max_new=5))
    engine.submit([request(2, context, max_new=30)])  # its prompt is cached
    engine.step()
    engine.update_weights(decoder(1).state_dict(), 1)
    outputs = listener.run(request(3, context, max_new=5), request(4, words(2, 5), max_new=5))
    assert_matches_model(outputs[3], decoder(1), context)
    assert_matches_model(outputs[4], decoder(1), words(2, 5))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("length", [6, 600])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_swap_during_prefill_recomputes_the_prompt(make: Make, steps: int, length: int) -> None:
    context = words(1, length)
    engine = make(max_length=700)
    engine.submit([request(1, context, max_new=8)])
    for _ in range(steps):
        engine.step()
    old_count = engine.tokens_generated
    engine.update_weights(decoder(1).state_dict(), 1)
    output = Listener(engine).run()[1]
    assert output.versions == [0] * old_count + [1] * (8 - old_count)
    if not old_count:
        assert_matches_model(output, decoder(1), context)


def test_keep_mode_retains_old_keys_and_recompute_does_not(make: Make) -> None:
    context = words(1, 12)
    outputs = {}
    for mode in ("keep", "recompute"):
        engine = make(kv_on_update=mode)
        engine.submit([request(1, context, max_new=20)])
        while engine.tokens_generated < 10:
            engine.step()
        engine.update_weights(decoder(1).state_dict(), 1)
        outputs[mode] = Listener(engine).run()[1]
        assert outputs[mode].versions == [0] * 10 + [1] * 10
    output = outputs["recompute"]
    expected = expected_logprobs(decoder(1), context + output.tokens[:10], output.tokens[10:])
    np.testing.assert_allclose(output.logprobs[10:], expected, atol=2e-4)
    assert abs(np.array(outputs["keep"].logprobs[10]) - expected[0]) > 1e-3


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_weights_of_another_model_are_rejected_without_effect(make: Make, change: str) -> None:
    engine = make()
    state = decoder(1).state_dict()
    norm = state.pop("final_norm")
    if change == "misshapen":
        state["final_norm"] = norm[:1]  # could be broadcast
    with pytest.raises(Refused, match="final_norm"):
        engine.update_weights(state, 1)
    assert engine.version == 0
    assert_matches_model(Listener(engine).run(request(1))[1], decoder(), [1, 2, 3])


def test_scores_agree_with_generated_logprobs(make: Make) -> None:
    engine = make()
    output = Listener(engine).run(request(1, [4, 5, 6], max_new=20))[1]
    scored = engine.score(np.array([4, 5, 6, *output.tokens]))
    assert scored.shape == (22,) and scored.dtype == np.float32
    np.testing.assert_allclose(scored[2:], output.logprobs, atol=2e-4)


def test_slots_longer_than_the_model_are_rejected(make: Make) -> None:
    with pytest.raises(ConfigError, match="positions"):
        make(max_length=1025)


@pytest.mark.rotating(8)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("storage", ["float", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_native_library_gives_the_models_logprobs_on_each_target(
    target: str, storage: str, tmp_path: Path
) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    path = tmp_path / "decoder.so"
    flags = [flag for flag in COMPILER_FLAGS if not flag.startswith(("-O", "-march"))]
    target_flags = ["-Og", f"-march={target}", f"-DMESHRL_STORAGE={storage}"]
    command = [
        compiler,
        *flags,
        *target_flags,
        str(SOURCE_DIRECTORY / "decoder.cpp"),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=scaled(100))
    slots = Slots(4, 256)
    compute = NativeCompute(Library(path), TINY, slots)
    memory = PagedCache(slots, compute.copy_block)
    compute.attach_block_table(memory.block_table)
    plan = CachePlan(80, 80, BLOCK_TOKENS * compute.cache_bytes_per_token)
    engine = BuiltinEngine(slots, compute, memory, TINY, target, EngineOptions(), lambda: plan)
    engine.wake(decoder().state_dict(), 0)
    contexts = {i: words(i, 3 + 45 * i) for i in range(5)}
    outputs = Listener(engine).run(*(request(i, c, max_new=20) for i, c in contexts.items()))
    for i, context in contexts.items():
        if storage == "float":
            assert_matches_model(outputs[i], decoder(), context)
        else:
            scored = engine.score(np.array([*context, *outputs[i].tokens]))[len(context) - 1 :]
            np.testing.assert_allclose(outputs[i].logprobs, scored, atol=1e-3)


@no_gpu
@pytest.mark.parametrize("path", ["auto", "graphs"])
def test_missing_gpu_is_an_error_and_no_fallback_to_the_cpu(path: str) -> None:
    with pytest.raises(
        GpuUnusable, match=r"the engine cannot compute on a GPU: torch .* built "
    ) as error:
        build_engine(TINY, 2, 64, backend=path, device="cuda")
    assert error.value.where == "mesh.device" and "--device cpu" in error.value.fix


def test_cpu_is_used_beside_a_gpu_on_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_engine(TINY, 2, 64, backend="eager", device="cuda")
    assert engine.backend == "torch eager, float32 (asked for)"
    assert "decodes on the CPU of a worker with a GPU" in caplog.text


def test_cpu_worker_computes_on_the_cpu() -> None:
    assert build_engine(TINY, 2, 64, backend="graphs").backend == "graphs, float32, cpu"
