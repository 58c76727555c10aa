"""Which path the built-in engine takes here, and why: on a GPU the GPU's, or none at all."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from common.base.errors import ConfigError
from common.generation.steps.native import native_library
from common.hardware.gpus import computing
from common.model.architecture.config import ModelConfig
from kernels.build import Library
from kernels.ops import can_be_captured

PATHS = ("auto", "native", "eager", "graphs")
_LOG = logging.getLogger(__name__)


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
