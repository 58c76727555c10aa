"""Size of the paged cache by free memory, and engines whose cache is smaller than their slots."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.generation.backends.buckets import GraphBucket
from meshrl.common.generation.backends.graphs import GraphCompute
from meshrl.common.generation.batch.cache_size import GIB, choose_auto_share, plan_cache_blocks
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.engine import BuiltinEngine
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.generation.builtin.free_memory import measure_free_bytes
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.job.cache_memory import CacheMemory
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS, count_full_blocks
from meshrl.common.job.memory.generation import count_weight_bytes, estimate_step_bytes
from meshrl.common.model.architecture.config import ModelConfig
from tests.unit.common.generation.engines_under_test import (
    TINY,
    Listener,
    built_in,
    decoder,
    request,
)
from tests.unit.common.generation.test_builtin_engine import words

BACKENDS = [pytest.param("native", marks=pytest.mark.needs("compiler")), "graphs"]
QWEN3_8B = ModelConfig(
    architecture="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12_288,
    qk_norm=True,
    max_positions=40_960,
)
SLOTS, LENGTH = 64, 32_768
H200_BYTES = 141 * 10**9
BLOCK_BYTES = 2 * 36 * 8 * 128 * 2 * BLOCK_TOKENS  # of QWEN3_8B in bfloat16


def build_tiny(path: str, free_bytes: int = 1 << 40, **more: Any) -> BuiltinEngine:
    """Return an engine of four slots of 128 tokens, asleep, on a device with this memory free."""
    return build_engine(TINY, 4, 128, backend=path, read_free_bytes=lambda _: free_bytes, **more)


def measure_tiny(path: str) -> tuple[int, int]:
    """Return the bytes of a block of `build_tiny`, and those of its weights and steps."""
    engine = build_tiny(path)
    compute = engine._compute
    step_bytes = estimate_step_bytes(TINY, 4, 128, 4, "native" if path == "native" else "torch")
    return BLOCK_TOKENS * engine.cache_bytes_per_token, compute.weights_bytes + step_bytes


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("tied", [False, True])
def test_native_engine_has_the_weights_of_the_plan_of_a_job(tied: bool) -> None:
    config = replace(TINY, tie_embeddings=tied)
    compute = build_engine(config, 1, 64, backend="native")._compute
    assert compute.weights_bytes == count_weight_bytes(config, 4, is_native=True)


def test_large_model_takes_a_share_of_a_gpu_instead_of_all_slots() -> None:
    step_bytes = estimate_step_bytes(QWEN3_8B, SLOTS, LENGTH, 2, "cuda")
    free_bytes = H200_BYTES - 2 * QWEN3_8B.num_parameters - step_bytes
    plan = plan_cache_blocks(free_bytes, 0.9, BLOCK_BYTES, SLOTS, LENGTH)
    assert plan.num_full_blocks * BLOCK_BYTES > 300 * 10**9  # more than two such GPUs have
    assert not plan.is_full and plan.size_bytes <= 0.9 * free_bytes < plan.size_bytes + BLOCK_BYTES
    assert plan.num_tokens > 20 * LENGTH


@settings(max_examples=60)
@given(
    free_bytes=st.integers(-(1 << 20), 1 << 30),
    share=st.floats(0.01, 1),
    size_bytes=st.integers(0, 1 << 30),
    block_bytes=st.integers(1, 1 << 24),
    num_slots=st.integers(1, 100),
    max_length=st.integers(2, 5000),
)
def test_plan_is_within_its_memory_and_holds_one_sequence(
    free_bytes: int,
    share: float,
    size_bytes: int,
    block_bytes: int,
    num_slots: int,
    max_length: int,
) -> None:
    arguments = free_bytes, share, block_bytes, num_slots, max_length
    least = -(-max_length // BLOCK_TOKENS) + 1
    limit_bytes = min(size_bytes, free_bytes) if size_bytes else free_bytes
    if least * block_bytes > limit_bytes:
        with pytest.raises(ConfigError, match=f"one sequence of {max_length} tokens") as error:
            plan_cache_blocks(*arguments, size_bytes=size_bytes)
        assert error.value.where == "rollout.kv_memory" and "max_tokens" in error.value.fix
        return
    plan = plan_cache_blocks(*arguments, size_bytes=size_bytes)
    assert least <= plan.num_blocks <= count_full_blocks(num_slots, max_length)
    allowed_bytes = size_bytes or max(int(free_bytes * share), least * block_bytes)
    assert plan.size_bytes <= min(allowed_bytes, free_bytes)
    assert plan.is_full or plan.size_bytes + block_bytes > min(allowed_bytes, free_bytes)


def test_auto_share_leaves_memory_to_processes_beside_the_engine() -> None:
    alone = choose_auto_share("cuda")
    assert choose_auto_share("cuda", is_time_sliced=True) < alone < 1
    assert choose_auto_share("cuda", num_workers=8) == alone
    assert choose_auto_share("cpu", num_workers=4) * 4 <= choose_auto_share("cpu") < 1


@pytest.mark.parametrize("path", BACKENDS)
def test_cache_takes_its_share_of_what_weights_and_steps_leave(path: str) -> None:
    block_bytes, other_bytes = measure_tiny(path)
    for memory, num_blocks in (
        (CacheMemory(share=0.5), 15),
        (CacheMemory(size_bytes=13 * block_bytes + 5), 13),
        (CacheMemory(share=0.9), 27),
        (CacheMemory(), 15),  # auto on a CPU: a half
        (CacheMemory(share=1.0), 30),
        (CacheMemory(share=0.01), 9),  # one sequence and one block
    ):
        engine = build_tiny(path, other_bytes + 30 * block_bytes + 9, cache_memory=memory)
        assert engine.cache_tokens == 0
        engine.wake(decoder().state_dict(), 0)
        assert engine.cache_tokens == num_blocks * BLOCK_TOKENS
    engine = build_tiny(path)
    engine.wake(decoder().state_dict(), 0)
    assert engine.cache_tokens == 4 * 128


def test_engine_without_memory_for_one_sequence_is_rejected_and_wakes_later() -> None:
    block_bytes, other_bytes = measure_tiny("graphs")
    free_bytes = other_bytes + 9 * block_bytes - 1
    engine = build_engine(TINY, 4, 128, backend="graphs", read_free_bytes=lambda _: free_bytes)
    with pytest.raises(ConfigError, match="one sequence of 128 tokens needs"):
        engine.wake(decoder().state_dict(), 0)
    assert engine.version < 0 and not engine.step()
    free_bytes += 1
    engine.wake(decoder().state_dict(), 0)
    assert len(Listener(engine).run(request(1, max_new=100))[1].tokens) == 100


def test_cache_keeps_its_size_when_the_engine_wakes_again() -> None:
    block_bytes, other_bytes = measure_tiny("graphs")
    readings = [other_bytes + 24 * block_bytes]
    engine = build_engine(TINY, 4, 128, backend="graphs", read_free_bytes=lambda _: readings.pop())
    engine.wake(decoder().state_dict(), 0)
    assert engine.cache_tokens == 12 * BLOCK_TOKENS
    engine.sleep()
    engine.wake(decoder().state_dict(), 0)  # without another reading
    assert engine.cache_tokens == 12 * BLOCK_TOKENS
    assert isinstance(engine._compute, GraphCompute) and engine._compute.keys.shape[1] == 12


def test_failed_allocation_of_the_cache_is_a_typed_error_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_bytes, other_bytes = measure_tiny("graphs")
    readings = [other_bytes + 24 * block_bytes, other_bytes + 30 * block_bytes]
    engine = build_engine(TINY, 4, 128, backend="graphs", read_free_bytes=lambda _: readings.pop())
    zeros = torch.zeros

    def fail(*shape: Any, **more: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nDetails")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(MeshError, match=r"the cache: CUDA out of memory\. Tried") as error:
        engine.wake(decoder().state_dict(), 0)
    assert "rollout.kv_memory" in error.value.fix
    cause = error.value.__cause__
    assert isinstance(cause, torch.OutOfMemoryError)
    [allocation] = [
        frame
        for frame, _ in traceback.walk_tb(cause.__traceback__)
        if frame.f_code.co_name == "_allocate"
    ]
    assert "model" not in allocation.f_locals  # nothing holds what was allocated
    monkeypatch.setattr(torch, "zeros", zeros)
    engine.wake(decoder().state_dict(), 0)
    assert not readings and engine.cache_tokens == 12 * BLOCK_TOKENS  # by the second reading
    assert Listener(engine).run(request(1))[1].tokens


def test_free_memory_of_a_gpu_is_read_from_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def read_memory(device: torch.device) -> tuple[int, int]:
        calls.append(device)
        return 7 * GIB, 9 * GIB

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", read_memory)
    device = torch.device("cuda", 0)
    assert measure_free_bytes(device) == 7 * GIB
    assert calls == ["empty_cache", device]
    assert 0 < measure_free_bytes(torch.device("cpu")) < 1 << 50


def draw_requests() -> list[GenerationRequest]:
    """Return twelve requests, greedy and sampled, of different lengths; some share a prefix."""
    shared = words(99, 20)
    return [
        request(
            i,
            [*(shared if i % 2 else []), *words(i, 5 + 7 * i % 40)],
            max_new=20 + 11 * i % 60,
            temperature=float(i % 4 < 2),
            session=i if i % 3 else -1,
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("path", BACKENDS)
def test_quarter_of_the_cache_gives_the_same_tokens(path: str) -> None:
    requests = draw_requests()
    full = built_in(path, slots=12)
    expected = Listener(full).run(*requests)
    block_bytes = BLOCK_TOKENS * full.cache_bytes_per_token
    quarter = CacheMemory(size_bytes=full.cache_tokens // BLOCK_TOKENS // 4 * block_bytes)
    engine = built_in(path, slots=12, cache_memory=quarter)
    assert engine.cache_tokens * 4 == full.cache_tokens
    outputs = Listener(engine).run(*requests)
    assert full.num_preempted == 0 < engine.num_preempted
    for i, output in expected.items():
        assert outputs[i].tokens == output.tokens and outputs[i].finish == output.finish
        np.testing.assert_allclose(outputs[i].logprobs, output.logprobs, atol=1e-4)


def test_buckets_share_the_memory_of_their_logits() -> None:
    engine = built_in("graphs", slots=12)
    Listener(engine).run(*draw_requests())
    compute = engine._compute
    assert isinstance(compute, GraphCompute)
    buckets: dict[GraphBucket, Any] = compute._captured
    assert len({bucket.lanes for bucket in buckets}) > 1
    assert len({captured.logits.data_ptr() for captured in buckets.values()}) == 1


def test_slots_of_long_sequences_take_host_memory_only_as_they_fill() -> None:
    def measure_resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = measure_resident_bytes()
    slots = Slots(SLOTS, LENGTH, 48 * 8)  # experts of Qwen3-30B-A3B: 1.6 GB if all were touched
    assert slots.experts.nbytes > 1.5 * 10**9
    assert measure_resident_bytes() - before < 40 << 20
