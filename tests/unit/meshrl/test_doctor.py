"""`meshrl doctor` names what a mesh would use here, and why it is not something better."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.job.checks.machine import devices
from tests.gpus.driver import Gpus
from tests.load import scaled


def doctor(tmp_path: Path, path: str, **more: str) -> str:
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "250"}
    environment |= more
    asked = subprocess.run(
        [sys.executable, "-m", "meshrl", "doctor"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        env=environment,
        check=False,
    )
    return asked.stdout


def line_of(output: str, what: str) -> str:
    return next(line for line in output.splitlines() if line.split()[1:2] == [what])


@pytest.mark.rotating(2)
def test_without_a_compiler_engine_and_training_take_torch_and_say_why(tmp_path: Path) -> None:
    output = doctor(tmp_path, str(tmp_path))
    for what, otherwise in (("engine", "torch eager"), ("training", "torch's operators")):
        line = line_of(output, what)
        assert line.startswith("note") and f"{otherwise}: no C++ compiler" in line


@pytest.mark.deep
@pytest.mark.needs("compiler")
def test_with_a_compiler_they_take_the_native_ones(tmp_path: Path) -> None:
    output = doctor(tmp_path, os.environ["PATH"])
    for what in ("engine", "training"):
        line = line_of(output, what)
        assert line.startswith("ok") and "native, compiled at the first start" in line


@pytest.mark.deep
@pytest.mark.needs("compiler")
@pytest.mark.skipif(devices.built_for_cuda(), reason="this torch has CUDA")
def test_gpus_are_listed_and_the_path_that_decoding_takes_on_them(
    tmp_path: Path, gpus: Gpus
) -> None:
    output = doctor(tmp_path, str(tmp_path))
    assert "no NVIDIA driver answers" in line_of(output, "gpu")
    gpus.gpu("GPU-a")
    output = doctor(tmp_path, str(tmp_path), **gpus.environment)
    listed, path = (line for line in output.splitlines() if line.split()[1:2] == ["gpu"])
    assert listed.startswith("ok") and "cuda:0 NVIDIA H100 (GPU-a)" in listed
    assert path.startswith("note") and 'mesh.device = "cuda" is refused' in path
    assert "built without CUDA" in path
