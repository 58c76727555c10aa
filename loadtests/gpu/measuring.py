"""Times on a device, and rates as shares of its peaks in `common/hardware/accelerators.toml`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from loadtests.gpu.plan import Figures, Incorrect, Settings
from loadtests.measuring.shapes import shape
from meshrl.common.hardware.accelerators import Accelerator, load_accelerators, match_kind
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder

MIN_REPEATS, MAX_REPEATS = 3, 200
MEASURED_S = 0.3  # of repeats on a GPU, at least one


def get_peaks(settings: Settings) -> Accelerator | None:
    """Return the declared peaks of the device; None for a CPU or an unknown GPU."""
    if settings.device != "cuda":
        return None
    return load_accelerators().get(match_kind(torch.cuda.get_device_name()))


def synchronize(settings: Settings) -> None:
    """Return when the device has computed all that was launched."""
    if settings.device == "cuda":
        torch.cuda.synchronize()


def measure_s(settings: Settings, call: Callable[[], object]) -> float:
    """Return the median of a call's seconds on the device, without the first call."""
    call()
    synchronize(settings)
    if settings.is_tiny:
        return _time_once(settings, call)
    once_s = max(_time_once(settings, call), 1e-6)
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(MEASURED_S / once_s)))
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(repeats + 1)
    ]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times_s: list[float] = [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
    return statistics.median(times_s)


def _time_once(settings: Settings, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    synchronize(settings)
    return time.perf_counter() - began


def describe_bandwidth(settings: Settings, seconds: float, size_bytes: float) -> Figures:
    """Return the rate of bytes that are read and written, and its share of the peak."""
    found: Figures = {"gb_per_s": size_bytes / seconds / 1e9}
    if peaks := get_peaks(settings):
        found["share_of_peak"] = size_bytes / seconds / peaks.memory_bytes_per_s
    return found


def describe_arithmetic(settings: Settings, seconds: float, operations: float) -> Figures:
    """Return the rate of operations, and its share of the peak in 16 bits."""
    found: Figures = {"tflops": operations / seconds / 1e12}
    if peaks := get_peaks(settings):
        found["share_of_peak"] = operations / seconds / peaks.flops
    return found


def check_close(found: Tensor, exact: Tensor, tolerance: float) -> Figures:
    """Return the largest error relative to the largest exact number; Incorrect above tolerance."""
    exact = exact.to(device=found.device, dtype=torch.float64)
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    if not error <= tolerance:
        raise Incorrect(f"the error is {error:.3g} of the largest number, above {tolerance:g}")
    return {"max_error": error}


def check_equal(found: Tensor, expected: Tensor, label: str) -> None:
    """Raise Incorrect unless tensors are equal to the last bit."""
    if not torch.equal(found, expected.to(found.device)):
        raise Incorrect(f"{label} differ from the expected ones")


def build_config(settings: Settings, **more: Any) -> ModelConfig:
    """Return the shape of Qwen3-0.6B, or of a tiny model."""
    if settings.is_tiny:
        return shape(64, 2, 128, 512, (4, 2), **{"head_dim": 32, "tie_embeddings": True} | more)
    about = {"head_dim": 128, "tie_embeddings": True, "rope_theta": 1e6} | more
    return shape(1024, 28, 3072, 151_936, (16, 8), **about)


def draw_model(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Return a model with random weights on the device."""
    with torch.device(settings.device):
        model = Decoder(config, dtype)
    model.initialise(torch.Generator(settings.device).manual_seed(0))
    return model
