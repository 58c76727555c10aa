"""Sleep and wake of a learner and of an engine: bytes per second, and memory that is given back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from loadtests.gpu.generating import (
    build_requests,
    copy_to_host,
    draw_prompts,
    generate,
    start_engine,
)
from loadtests.gpu.measuring import build_config, draw_model, measure_s, synchronize
from loadtests.gpu.parts.training import TINY_LENGTHS, build_learner, draw_bin
from loadtests.gpu.plan import Figures, Incorrect, Settings
from meshrl.common.base.files.offload_media import MemorySegment
from meshrl.common.base.files.offloaded_tensors import (
    compute_size_bytes,
    offload,
    read_header,
    restore,
)
from meshrl.common.model.files.tensor_storages import TensorStorages

COPIED_BYTES = 2 << 30
KEPT_BYTES = 256 << 20  # that may stay allocated in sleep: cuBLAS has 32 MiB a stream, tables
PROMPT_TOKENS, NEW_TOKENS, SLOTS = 32, 16, 32


def count_allocated(settings: Settings) -> int:
    """Return the bytes of this process's tensors on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if settings.device == "cuda" else 0


def time_s(settings: Settings, call: Callable[[], object]) -> float:
    """Return the seconds of one call until the device has finished."""
    synchronize(settings)
    began = time.perf_counter()
    call()
    synchronize(settings)
    return time.perf_counter() - began


def check_released(settings: Settings, before_bytes: int, label: str) -> None:
    """Raise Incorrect if a sleeping instance has more memory than before it was created."""
    if count_allocated(settings) - before_bytes > KEPT_BYTES:
        kept = (count_allocated(settings) - before_bytes) / 2**20
        raise Incorrect(f"{kept:.0f} MiB of {label} stay allocated in sleep")


class SleepingLearner:
    """Learner whose tensors go to a memory segment and back, as a training instance's do."""

    def __init__(self, settings: Settings) -> None:
        config = build_config(settings)
        self.settings = settings
        self.bin = draw_bin(config, TINY_LENGTHS)
        dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
        self.learner = build_learner(draw_model(settings, config, torch.float32), dtype)
        self.train()
        self.learner.free_gradients()
        derived = self.learner.get_derived_tensors()
        self.memory = TensorStorages(self.learner.get_tensors(), derived, self.learner.refresh)
        descriptor = os.memfd_create("gpu-check", os.MFD_CLOEXEC)
        os.truncate(descriptor, compute_size_bytes({}, self.memory.sizes_bytes))
        self.segment = MemorySegment(f"/proc/self/fd/{descriptor}", "gpu-check")
        os.close(descriptor)

    def train(self) -> float:
        """Apply one step; return the sum of absolute gradients."""
        gradient, stats = self.learner.compute_gradient(self.bin)
        total = float(gradient.abs().sum())
        self.learner.apply_gradient(gradient, stats.tokens, 1.0)
        return total

    def compute_gradient_sum(self) -> float:
        """Return the sum of absolute gradients, and change no weight."""
        gradient, _ = self.learner.compute_gradient(self.bin)
        total = float(gradient.abs().sum())
        self.learner.free_gradients()
        return total

    def sleep(self) -> None:
        """Copy the tensors to the segment and release their memory."""
        self.learner.free_gradients()
        offload(self.segment, {}, self.memory)
        self.memory.release()

    def wake(self) -> None:
        """Allocate the memory again and restore the tensors."""
        self.memory.reallocate()
        restore(self.segment, read_header(self.segment), self.memory)
        self.memory.refresh()


def measure_pinned_copy(settings: Settings) -> Figures:
    """Measure copies between pinned memory and the device, the limit of sleep and wake."""
    size_bytes = 1 << 20 if settings.is_tiny else COPIED_BYTES
    there = torch.ones(size_bytes, dtype=torch.uint8, device=settings.device)
    here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=settings.device == "cuda")
    out_s = measure_s(settings, lambda: here.copy_(there))
    in_s = measure_s(settings, lambda: there.copy_(here))
    return {
        "to_host_gb_per_s": size_bytes / out_s / 1e9,
        "to_device_gb_per_s": size_bytes / in_s / 1e9,
    }


def measure_learner(settings: Settings) -> Figures:
    """Measure sleep and wake of a learner, and compare the gradient before and after."""
    before_bytes = count_allocated(settings)
    sleeper = SleepingLearner(settings)
    expected = sleeper.compute_gradient_sum()
    asleep_s = time_s(settings, sleeper.sleep)
    check_released(settings, before_bytes, "the learner")
    awake_s = time_s(settings, sleeper.wake)
    found = sleeper.compute_gradient_sum()
    if abs(found - expected) > 1e-3 * expected:
        raise Incorrect(f"the gradient's sum is {found} after sleep, and was {expected}")
    size_bytes = sum(sleeper.memory.sizes_bytes.values())
    return {
        "sleep_gb_per_s": size_bytes / asleep_s / 1e9,
        "wake_gb_per_s": size_bytes / awake_s / 1e9,
        "offloaded_gib": size_bytes / 2**30,
    }


def measure_engine(settings: Settings) -> Figures:
    """Measure sleep of an engine, and waking it with weights from pinned memory."""
    config = build_config(settings)
    dtype = torch.bfloat16
    state = copy_to_host(
        draw_model(settings, config, dtype).state_dict(), pinned=settings.device == "cuda"
    )
    requests = build_requests(draw_prompts(config, SLOTS, PROMPT_TOKENS), NEW_TOKENS)
    before_bytes = count_allocated(settings)
    engine = start_engine(settings, config, SLOTS, PROMPT_TOKENS + NEW_TOKENS, "bfloat16")
    engine.wake(state, 0)
    expected = generate(engine, requests)
    asleep_s = time_s(settings, engine.sleep)
    check_released(settings, before_bytes, "the engine")
    awake_s = time_s(settings, lambda: engine.wake(state, 1))
    again = build_requests(draw_prompts(config, SLOTS, PROMPT_TOKENS), NEW_TOKENS, first=SLOTS)
    found = generate(engine, again)
    equal = [bool((found[SLOTS + i][0] == expected[i][0]).all()) for i in range(SLOTS)]
    if not all(equal):
        raise Incorrect(f"{equal.count(False)} of {SLOTS} requests have other tokens after sleep")
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    return {
        "sleep_ms": 1000 * asleep_s,
        "wake_gb_per_s": size_bytes / awake_s / 1e9,
        "weights_gib": size_bytes / 2**30,
    }


CASES = {"pinned_copy": measure_pinned_copy, "learner": measure_learner, "engine": measure_engine}
