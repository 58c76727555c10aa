"""Builds the built-in engine, on the fastest path that this host supports."""

from __future__ import annotations

import math
from typing import Any

import torch

from common.base.errors import ConfigError
from common.generation.batch.blocks import BLOCK
from common.generation.batch.paged import PagedMemory
from common.generation.batch.slots import Slots
from common.generation.builtin.engine import EngineOptions, TorchEngine
from common.generation.builtin.paths import PATHS, chosen
from common.generation.steps.graphs import GraphCompute
from common.generation.steps.native import DTYPES, NativeCompute
from common.model.architecture.config import ModelConfig

NAMES = {"eager": "torch eager", "graphs": "graphs"}  # of the torch paths, for people
BUILD_S = 300.0  # some 10 s on a quiet core; engines of one host wait for each other

__all__ = ["BUILD_S", "PATHS", "TorchEngine", "build"]


def build(
    config: ModelConfig,
    slots: int,
    max_length: int,
    *,
    path: str = "auto",
    device: str = "cpu",
    dtype: str = "float32",
    kv_tokens: int = 0,
    **options: Any,
) -> TorchEngine:
    """An engine of `slots` sequences of up to `max_length` tokens, asleep until it gets weights.

    `path`: `native` needs a C++ compiler, `eager` only torch, `graphs` is for a GPU, and runs on a
    CPU as well; `auto` is what `device`, "cpu" or "cuda", has for it (`paths.py`). `kv_tokens`: of
    the paged cache; 0: all slots full. `options` are EngineOptions'. ConfigError for what cannot be
    had, a GPU among it.
    """
    if max_length > config.max_positions:
        dynamic = (config.rope_scaling or {}).get("rope_type") == "dynamic"
        beyond = ", behind which its dynamic scaling would begin" if dynamic else ""
        raise ConfigError(
            f"slots of {max_length} tokens exceed the model's {config.max_positions} positions"
            + beyond,
            where="rollout.max_tokens",
            fix="lower it" if dynamic else "lower it, or raise max_position_embeddings",
        )
    if path not in PATHS or dtype not in DTYPES:
        raise ConfigError(
            f"there is no path {path!r} in {dtype!r}",
            where="rollout",
            fix=f"path: one of {', '.join(PATHS)}; dtype: one of {', '.join(DTYPES)}",
        )
    how = EngineOptions(**options)
    places = Slots(slots, max_length, math.prod(config.expert_shape))
    width = -(-max_length // BLOCK)
    blocks = max(-(-kv_tokens // BLOCK) or slots * width, width + 1)

    taken = chosen(path, device, config, dtype)
    compute: NativeCompute | GraphCompute
    if taken.library is not None:
        compute = NativeCompute(taken.library, config, places, blocks)
        name = f"native, {dtype}"
    else:
        compute = GraphCompute(config, getattr(torch, dtype), places, blocks, taken.device)
        behind = f" ({taken.why})" if taken.why else ""
        on = f", {taken.device.type}" if taken.path == "graphs" else ""
        name = f"{NAMES[taken.path]}, {dtype}{on}{behind}"
    memory = PagedMemory(places, blocks, compute.copy)
    compute.attach(memory.table)
    return TorchEngine(places, compute, memory, config, name, how)
