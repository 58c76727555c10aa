"""Builds the built-in engine, on the fastest path that this host supports: on a GPU the GPU's, or
none at all.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.batch.blocks import BLOCK
from meshrl.common.generation.batch.paged import PagedMemory
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.engine import EngineOptions, TorchEngine
from meshrl.common.generation.steps.graphs import GraphCompute
from meshrl.common.generation.steps.native import DTYPES, NativeCompute, native_library
from meshrl.common.hardware.gpus import computing
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.kernels.build import Library
from meshrl.kernels.ops import can_be_captured

PATHS = ("auto", "native", "eager", "graphs")
NAMES = {"eager": "torch eager", "graphs": "graphs"}  # of the torch paths, for people
BUILD_S = 300.0  # some 10 s on a quiet core; engines of one host wait for each other
_LOG = logging.getLogger(__name__)

__all__ = ["BUILD_S", "PATHS", "TorchEngine", "build"]


@dataclass(frozen=True)
class ChosenPath:
    """A path, and where it computes."""

    path: str  # native | eager | graphs
    device: torch.device
    why: str = ""  # it is not a faster one
    library: Library | None = None  # of the native path


def chosen(path: str, device: str, config: ModelConfig, dtype: str) -> ChosenPath:
    """What `path` means for a worker of `device` ("cpu" or "cuda"). `auto` on cuda is the GPU's
    path or NoGpuPath, never another one; on a CPU it is native, or eager where there is no
    compiler. ConfigError where native is asked for and cannot be had.
    """
    cpu = torch.device("cpu")
    if device == "cuda" and path in ("auto", "graphs"):
        return on_gpu()
    if path == "graphs":
        return ChosenPath("graphs", cpu)
    if device == "cuda":
        _LOG.warning("the engine decodes on the CPU of a worker with a GPU: rollout.path %s", path)
    if path == "eager":
        return ChosenPath("eager", cpu, "asked for")
    found = native_library(config, dtype)
    if found.path is not None:
        return ChosenPath("native", cpu, library=found)
    if path == "native":
        raise ConfigError(found.reason, where="rollout.path", fix="install g++, or use eager")
    _LOG.warning("the engine takes its torch path: %s", found.reason)
    return ChosenPath("eager", cpu, found.reason)


def on_gpu() -> ChosenPath:
    """The GPU's path; NoGpuPath, with what is missing."""
    computing.need("the engine")
    why = "" if can_be_captured() else "operators are plain PyTorch, without CUDA graphs"
    return ChosenPath("graphs", torch.device("cuda"), why)


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
    CPU as well; `auto` is what `device`, "cpu" or "cuda", has for it (`chosen`). `kv_tokens`: of
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
