"""Builder of the built-in engine, with the fastest backend that this host supports.

On a GPU that is the GPU's backend, never another one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.backends.graphs import GraphCompute
from meshrl.common.generation.backends.native import (
    DTYPE_DEFINES,
    NativeCompute,
    build_native_library,
)
from meshrl.common.generation.batch.cache_size import (
    CachePlan,
    choose_auto_share,
    plan_cache_blocks,
    plan_cache_tokens,
)
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.engine import BuiltinEngine, EngineOptions
from meshrl.common.generation.builtin.free_memory import measure_free_bytes
from meshrl.common.hardware.gpus import gpu_requirement
from meshrl.common.job.cache_memory import AUTO_MEMORY, CacheMemory
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS
from meshrl.common.job.memory.generation import choose_compute_kind, estimate_step_bytes
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.kernels.library_build import Library
from meshrl.kernels.ops import can_capture_cuda_graph

BACKENDS = ("auto", "native", "eager", "graphs")
BACKEND_LABELS = {"eager": "torch eager", "graphs": "graphs"}  # display names of the torch backends
BUILD_TIMEOUT_S = 300.0  # some 10 s on an idle core; engines of one host wait for each other
ReadFreeBytes = Callable[[torch.device], int]
_LOG = logging.getLogger(__name__)

__all__ = ["BACKENDS", "BUILD_TIMEOUT_S", "BuiltinEngine", "build_engine"]


@dataclass(frozen=True)
class EngineBackend:
    """Backend and its device."""

    name: str  # native | eager | graphs
    device: torch.device
    fallback_reason: str = ""  # reason why the backend is not a faster one
    library: Library | None = None  # library of the native backend


def choose_backend(requested: str, device: str, config: ModelConfig, dtype: str) -> EngineBackend:
    """Choose the backend for `requested` on `device` ("cpu" or "cuda").

    `auto` on cuda is the GPU's backend or NoGpuPath, never another one. On a CPU it is native, or
    eager without a compiler. Raise ConfigError if native is requested and unavailable.
    """
    cpu = torch.device("cpu")
    if device == "cuda" and requested in ("auto", "graphs"):
        return choose_gpu_backend()
    if requested == "graphs":
        return EngineBackend("graphs", cpu)
    if device == "cuda":
        _LOG.warning(
            "the engine decodes on the CPU of a worker with a GPU: rollout.backend %s", requested
        )
    if requested == "eager":
        return EngineBackend("eager", cpu, "asked for")
    found = build_native_library(config, dtype)
    if found.path is not None:
        return EngineBackend("native", cpu, library=found)
    if requested == "native":
        raise ConfigError(found.reason, where="rollout.backend", fix="Install g++, or use eager")
    _LOG.warning("the engine uses its torch backend: %s", found.reason)
    return EngineBackend("eager", cpu, found.reason)


def choose_gpu_backend() -> EngineBackend:
    """Return the GPU's backend; raise NoGpuPath, naming what is missing, if it cannot run."""
    gpu_requirement.require_gpu("the engine")
    why = "" if can_capture_cuda_graph() else "operators are plain PyTorch, without CUDA graphs"
    return EngineBackend("graphs", torch.device("cuda"), why)


def build_engine(
    config: ModelConfig,
    num_slots: int,
    max_length: int,
    *,
    backend: str = "auto",
    device: str = "cpu",
    dtype: str = "float32",
    kv_cache_tokens: int = 0,
    cache_memory: CacheMemory = AUTO_MEMORY,
    is_time_sliced: bool = False,
    num_workers: int = 1,
    read_free_bytes: ReadFreeBytes = measure_free_bytes,
    **options: Any,
) -> BuiltinEngine:
    """Build an engine of `num_slots` sequences of up to `max_length` tokens, without weights.

    It is asleep until it gets weights. Backends: `native` needs a C++ compiler, `eager` only torch,
    `graphs` is for a GPU and runs on a CPU as well; `auto` selects by `device`, "cpu" or "cuda"
    (`choose_backend`). `options` are those of EngineOptions. Raise ConfigError for unavailable
    parts, including a GPU.

    The first wake-up chooses the size of the paged cache: `kv_cache_tokens`, or what all slots
    take as far as `cache_memory` allows. `is_time_sliced` and `num_workers`: sharing of the
    device, as in `choose_auto_share`. `read_free_bytes` returns the free memory of a device.
    """
    if max_length > config.max_positions:
        dynamic = (config.rope_scaling or {}).get("rope_type") == "dynamic"
        beyond = ", above which its dynamic scaling would start" if dynamic else ""
        raise ConfigError(
            f"slots of {max_length} tokens exceed the model's {config.max_positions} positions"
            + beyond,
            where="rollout.max_tokens",
            fix="lower it" if dynamic else "Lower it, or raise max_position_embeddings",
        )
    if backend not in BACKENDS or dtype not in DTYPE_DEFINES:
        raise ConfigError(
            f"there is no backend {backend!r} for {dtype!r}",
            where="rollout",
            fix=f"Set backend to one of {', '.join(BACKENDS)}, and dtype to one of "
            f"{', '.join(DTYPE_DEFINES)}",
        )
    how = EngineOptions(**options)
    places = Slots(num_slots, max_length, math.prod(config.routing_shape))
    choice = choose_backend(backend, device, config, dtype)
    compute: NativeCompute | GraphCompute
    if choice.library is not None:
        compute = NativeCompute(choice.library, config, places)
        name = f"native, {dtype}"
    else:
        compute = GraphCompute(config, getattr(torch, dtype), places, choice.device)
        behind = f" ({choice.fallback_reason})" if choice.fallback_reason else ""
        on = f", {choice.device.type}" if choice.name == "graphs" else ""
        name = f"{BACKEND_LABELS[choice.name]}, {dtype}{on}{behind}"
    memory = PagedCache(places, compute.copy_block)
    compute.attach_block_table(memory.block_table)

    def plan_cache() -> CachePlan:
        block_bytes = BLOCK_TOKENS * compute.cache_bytes_per_token
        shape = block_bytes, num_slots, max_length
        if kv_cache_tokens:
            return plan_cache_tokens(kv_cache_tokens, *shape)
        kind, width = choice.device.type, getattr(torch, dtype).itemsize
        compute_kind = choose_compute_kind(choice.name, kind)
        step_bytes = estimate_step_bytes(config, num_slots, max_length, width, compute_kind)
        free_bytes = read_free_bytes(choice.device) - compute.weights_bytes - step_bytes
        share = cache_memory.share or choose_auto_share(
            kind, is_time_sliced=is_time_sliced, num_workers=num_workers
        )
        plan = plan_cache_blocks(free_bytes, share, *shape, size_bytes=cache_memory.size_bytes)
        _LOG.info("%s", plan.describe())
        return plan

    return BuiltinEngine(places, compute, memory, config, name, how, plan_cache)
