"""Builds the built-in engine, on the fastest path that this host supports."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from common.errors import ConfigError
from common.generation.builtin.blocks import BLOCK
from common.generation.builtin.engine import TorchEngine
from common.generation.builtin.paged import PagedMemory
from common.generation.builtin.slots import Slots
from common.generation.steps.eager import ContiguousMemory, EagerCompute
from common.generation.steps.graphs import GraphCompute
from common.generation.steps.native import (
    DTYPES,
    NativeCompute,
    native_library,
)
from common.model.config import ModelConfig
from common.model.decoder import Decoder

PATHS = ("auto", "native", "eager", "graphs")
BUILD_S = 300.0  # some 10 s on a quiet core; engines of one host wait for each other

__all__ = ["BUILD_S", "PATHS", "TorchEngine", "build"]


def build(
    config: ModelConfig,
    slots: int,
    max_length: int,
    *,
    path: str = "auto",
    dtype: str = "float32",
    kv_tokens: int = 0,
    **options: Any,
) -> TorchEngine:
    """An engine of `slots` sequences of up to `max_length` tokens, asleep until it gets weights.

    `path`: `native` needs a C++ compiler, `eager` only torch, `graphs` is for a GPU; `auto` takes
    `native`, or `eager` and logs why. `kv_tokens`: of the paged cache; 0: all slots full. `options`
    are TorchEngine's.
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
    places = Slots(slots, max_length, math.prod(config.expert_shape))
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    width = -(-max_length // BLOCK)
    blocks = max(-(-kv_tokens // BLOCK) or slots * width, width + 1)

    def paged(compute: NativeCompute | GraphCompute, name: str) -> TorchEngine:
        memory = PagedMemory(places, blocks, compute.copy)
        compute.attach(memory.table)
        return TorchEngine(places, compute, memory, shapes, path=name, **options)

    if path == "graphs":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        graphs = GraphCompute(config, getattr(torch, dtype), places, blocks, device)
        return paged(graphs, f"graphs, {dtype}, {device.type}")
    reason = "asked for"
    if path != "eager":
        found = native_library(config, dtype)
        if found.path is not None:
            return paged(NativeCompute(found, config, places, blocks), f"native, {dtype}")
        if path == "native":
            raise ConfigError(found.reason, where="rollout.path", fix="install g++, or use eager")
        reason = found.reason
        logging.getLogger(__name__).warning("the engine takes its torch path: %s", reason)
    eager = EagerCompute(config, getattr(torch, dtype), places)
    slow = f"torch eager, {dtype} ({reason})"
    return TorchEngine(places, eager, ContiguousMemory(places, eager), shapes, path=slow, **options)
