"""Device and software of the host, and the rates of plain PyTorch that limit all others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

import torch

from loadtests.gpu.measuring import describe_arithmetic, describe_bandwidth, measure_s
from loadtests.gpu.plan import Figures, NoGpu, Settings

COPIED_BYTES = 4 << 30
PRODUCT_WIDTH = 8192  # of square matrices


def measure_device(settings: Settings) -> Figures:
    """Return versions, and rates of a copy and of a product of matrices in bfloat16."""
    found: Figures = {"python": platform.python_version(), "torch": torch.__version__}
    if settings.device == "cuda":
        if not torch.cuda.is_available():
            raise NoGpu(f"torch {torch.__version__} finds no GPU")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["triton"] = importlib.metadata.version("triton")
        found["gpu"] = torch.cuda.get_device_name()
        found["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    size_bytes = COPIED_BYTES if not settings.is_tiny else 1 << 20
    source = torch.ones(size_bytes, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    copied_s = measure_s(settings, lambda: target.copy_(source))
    found |= {
        f"copy_{name}": value
        for name, value in describe_bandwidth(settings, copied_s, 2.0 * size_bytes).items()
    }
    width = PRODUCT_WIDTH if not settings.is_tiny else 64
    a, b = torch.randn(2, width, width, device=settings.device).bfloat16()
    product_s = measure_s(settings, lambda: a @ b)
    return found | {
        f"product_{name}": value
        for name, value in describe_arithmetic(settings, product_s, 2.0 * width**3).items()
    }


CASES = {"device": measure_device}
