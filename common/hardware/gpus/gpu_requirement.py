"""Requirement that torch can compute on this process's GPU, checked without a CUDA context."""

from __future__ import annotations

import os

import torch

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.gpus.visibility import CUDA_ENV


class GpuUnusable(ConfigError):
    """Error for a process that must compute on a GPU and cannot."""

    code = "no_gpu_path"


def require_gpu(component: str) -> None:
    """Raise GpuUnusable with the reason unless torch sees a GPU for `component`. Blocks."""
    if torch.cuda.is_available():
        return
    visible_devices = os.environ.get(CUDA_ENV)
    limit = (
        f"{CUDA_ENV} is not set" if visible_devices is None else f"{CUDA_ENV}={visible_devices!r}"
    )
    lacking = f", built for CUDA {torch.version.cuda}, finds none ({limit})"
    if torch.version.cuda is None:
        lacking = " is built without CUDA"
    raise GpuUnusable(
        f"{component} cannot compute on a GPU: torch {torch.__version__}{lacking}",
        where="mesh.device",
        fix="Repair the installation, or start the mesh's workers with `--device cpu`",
    )
