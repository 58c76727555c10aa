"""Peaks of engines: resident memory above that before the engine was built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from loadtests.measuring.processes import forked
from loadtests.memory.training import compare, measure_peak
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.generation import plan_engine
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder

SLOTS, MAX_TOKENS = 8, 1024
NEW_TOKENS = 48
MAX_CALLS = 20_000


def measure_engine(shape: ModelConfig, backend: str, dtype: str = "float32") -> dict[str, float]:
    """Return the estimated and the measured bytes of an engine whose slots are all full.

    The C++ decoder allocates its own memory, so that of the process is measured.
    """
    rollout = {"slots": SLOTS, "max_tokens": MAX_TOKENS, "backend": backend, "dtype": dtype}
    config = JobConfig.from_document({"rollout": rollout})

    def run(_: int) -> int:
        torch.set_num_threads(1)
        with torch.inference_mode():
            model = Decoder(shape, getattr(torch, dtype))
            model.initialise(torch.Generator().manual_seed(0))
        weights = model.state_dict()

        def work() -> None:
            engine = build_engine(shape, SLOTS, MAX_TOKENS, backend=backend, dtype=dtype)
            engine.wake(weights, 0)
            fill_slots(engine, shape.vocab_size)

        if backend != "native":
            return measure_peak(work)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
        before = _read_status("VmRSS")
        work()
        return _read_status("VmHWM") - before

    [measured] = forked(1, run)
    return compare(plan_engine(config, shape, 1, 1).total_bytes, measured)


def fill_slots(engine: BuiltinEngine, vocabulary: int) -> None:
    """Generate in all slots until each is full; shorter requests end first."""
    random = np.random.default_rng(0)
    requests = []
    for slot in range(SLOTS):
        new_tokens = NEW_TOKENS + slot
        prompt = random.integers(0, vocabulary, MAX_TOKENS - new_tokens).astype(np.int32)
        about = (slot, prompt, new_tokens, 1.0, (), slot, -1)
        requests.append(GenerationRequest(*about))
    engine.submit(requests)
    for _ in range(MAX_CALLS):
        if not engine.step():
            return
    raise RuntimeError(f"the engine did not finish in {MAX_CALLS} calls")


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
