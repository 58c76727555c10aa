"""Which path an engine takes: on a worker with a GPU the GPU's, or it is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from meshrl.common.generation.builtin.build import build
from meshrl.common.hardware.gpus.computing import NoGpuPath
from tests.unit.common.generation.engines_under_test import TINY

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")


@no_gpu
@pytest.mark.parametrize("path", ["auto", "graphs"])
def test_without_its_gpu_an_engine_is_refused_and_does_not_decode_on_the_cpu(path: str) -> None:
    with pytest.raises(
        NoGpuPath, match=r"the engine cannot compute on a GPU: torch .* built "
    ) as told:
        build(TINY, 2, 64, path=path, device="cuda")
    assert told.value.where == "mesh.device" and "--device cpu" in told.value.fix


def test_the_cpu_is_taken_beside_a_gpu_where_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build(TINY, 2, 64, path="eager", device="cuda")
    assert engine.path == "torch eager, float32 (asked for)"
    assert "decodes on the CPU of a worker with a GPU" in caplog.text


def test_a_worker_of_the_cpu_computes_there_whatever_the_host_has() -> None:
    assert build(TINY, 2, 64, path="graphs").path == "graphs, float32, cpu"
