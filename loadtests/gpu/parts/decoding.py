"""The built-in engine's path on the device: equal tokens to the CPU's path, and its speed."""

from __future__ import annotations

import time

import numpy as np
import torch

from loadtests.gpu.generating import (
    build_requests,
    copy_to_host,
    draw_prompts,
    generate,
    start_engine,
)
from loadtests.gpu.measuring import build_config, draw_model, get_peaks
from loadtests.gpu.plan import Figures, Incorrect, Settings
from loadtests.measuring.shapes import shape
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.kernels.ops import can_capture_cuda_graph

PROMPT_TOKENS, NEW_TOKENS = 128, 128
EQUAL_PROMPTS, EQUAL_TOKENS = 12, 48
LOGPROB_GAP = 1e-3  # between two orders of float32 sums over a few hundred numbers


def measure_equality(settings: Settings) -> Figures:
    """Compare greedy tokens in float32 with those of the CPU's native path.

    The paths add in different orders, so one token of a near tie may differ, with all after it.
    """
    config = shape(128, 3, 256, 1024, (4, 2), head_dim=32, tie_embeddings=True)
    state = copy_to_host(draw_model(Settings("cpu"), config, torch.float32).state_dict())
    prompts = [p[: 5 + 9 * i] for i, p in enumerate(draw_prompts(config, EQUAL_PROMPTS, 120))]
    requests = build_requests(prompts, EQUAL_TOKENS)
    max_length = len(prompts[-1]) + EQUAL_TOKENS + 1
    found = []
    for engine in (
        start_engine(settings, config, EQUAL_PROMPTS // 2, max_length, "float32"),
        build_engine(config, EQUAL_PROMPTS // 2, max_length, backend="auto", device="cpu"),
    ):
        engine.wake(state, 0)
        found.append(generate(engine, requests))
    pairs = [(found[0][request.id], found[1][request.id]) for request in requests]
    equal = [bool(np.array_equal(here[0], there[0])) for here, there in pairs]
    gaps = [np.abs(a[1] - b[1]).max() for (a, b), same in zip(pairs, equal, strict=True) if same]
    figures = {"equal_sequences": sum(equal), "max_logprob_gap": float(max(gaps, default=np.inf))}
    if sum(equal) < len(equal) - 1 or figures["max_logprob_gap"] > LOGPROB_GAP:
        raise Incorrect(f"the paths differ: {figures} of {len(equal)}")
    return figures


def measure_speed(settings: Settings, batch: int) -> Figures:
    """Measure tokens per second of a batch of equal requests, prefill included, when warm."""
    if settings.is_tiny:
        batch = min(batch, 4)
    prompt, new = (8, 8) if settings.is_tiny else (PROMPT_TOKENS, NEW_TOKENS)
    config = build_config(settings)
    if settings.device == "cuda" and not can_capture_cuda_graph():
        raise Incorrect("decode steps are not captured in graphs: see kernels.build")
    dtype = torch.bfloat16
    engine = start_engine(settings, config, batch, prompt + new, "bfloat16")
    engine.wake(draw_model(settings, config, dtype).state_dict(), 0)
    prompts = draw_prompts(config, batch, prompt)
    generate(engine, build_requests(prompts, new, 1.0))  # captures graphs
    requests = build_requests(prompts, new, 1.0, first=batch)
    first_token_s: list[float] = []
    began = time.perf_counter()
    generate(
        engine, requests, on_output=lambda _: first_token_s.append(time.perf_counter() - began)
    )
    seconds = time.perf_counter() - began
    decode_s = seconds - first_token_s[0]
    found: Figures = {
        "tokens_per_s": batch * new / seconds,
        "first_token_ms": 1000 * first_token_s[0],
        "step_ms": 1000 * decode_s / (new - 1),
    }
    if peaks := get_peaks(settings):
        model = ModelShape.from_config(config)
        cached = batch * (prompt + new / 2) * model.compute_kv_bytes_per_token(1)
        limit_s = (model.parameter_bytes + cached) / peaks.memory_bytes_per_s
        found["share_of_bandwidth"] = limit_s * (new - 1) / decode_s
    return found


CASES = {
    "equal_tokens": measure_equality,
    "batch_1": lambda settings: measure_speed(settings, 1),
    "batch_32": lambda settings: measure_speed(settings, 32),
    "batch_256": lambda settings: measure_speed(settings, 256),
}
