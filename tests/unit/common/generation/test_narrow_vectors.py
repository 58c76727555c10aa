"""The native decoder computes the same on processors with narrower vectors than this one's."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from meshrl.common.generation.batch.paged import PagedMemory
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.builtin.engine import EngineOptions, TorchEngine
from meshrl.common.generation.steps.native import NativeCompute
from meshrl.kernels.build import COMPILERS, FLAGS, SOURCES, Library
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import TINY, Listener, decoder, request
from tests.unit.common.generation.test_torch_engine import holds, words

TARGETS = {"x86_64": ("haswell", "x86-64-v2"), "aarch64": ("armv8-a",)}.get(platform.machine(), ())


@pytest.mark.rotating(4)
@pytest.mark.needs("compiler")
@pytest.mark.parametrize("storage", ["float", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_it_computes_what_the_model_says(target: str, storage: str, tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    path = tmp_path / "decoder.so"
    flags = [flag for flag in FLAGS if not flag.startswith(("-O", "-march"))]
    more = ["-Og", f"-march={target}", f"-DMESHRL_STORAGE={storage}"]
    command = [compiler, *flags, *more, str(SOURCES / "decoder.cpp"), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=scaled(100))
    slots = Slots(4, 256)
    compute = NativeCompute(Library(path), TINY, slots, 80)
    memory = PagedMemory(slots, 80, compute.copy)
    compute.attach(memory.table)
    engine = TorchEngine(slots, compute, memory, TINY, target, EngineOptions())
    engine.wake(decoder().state_dict(), 0)
    contexts = {i: words(i, 3 + 45 * i) for i in range(5)}
    heard = Listener(engine).run(*(request(i, c, max_new=20) for i, c in contexts.items()))
    for i, context in contexts.items():
        if storage == "float":
            holds(heard[i], decoder(), context)
        else:
            scored = engine.score(np.array([*context, *heard[i].tokens]))[len(context) - 1 :]
            np.testing.assert_allclose(heard[i].logprobs, scored, atol=1e-3)
