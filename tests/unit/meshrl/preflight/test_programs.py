"""Interpreters, MCP servers and devices that a job names are there, or it is said what is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from meshrl.preflight import devices, programs
from tests.unit.meshrl.preflight.conftest import read, refusal

SGLANG = "rollout.engine=sglang"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_sglang_that_is_not_installed_is_said_with_the_command_that_installs_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_ENGINES", str(place.parent / "engines"))
    programs.sglang(read(place))
    said = refusal(programs.sglang, place, SGLANG)
    assert f"no interpreter at {place.parent}/engines/sglang/bin/python" in said
    assert "meshrl engine install sglang" in said


def test_a_model_that_sglang_computes_otherwise_is_refused_before_it_is_looked_for(
    place: Path,
) -> None:
    mistral = ("model.config.model_type=mistral", "model.config.num_key_value_heads=2")
    window = "model.config.sliding_window=40"
    said = refusal(programs.sglang, place, SGLANG, *mistral, window)
    assert "without its window of 40 tokens, which sequences of 64 exceed" in said
    assert "rollout.max_tokens to 40 at most" in said
    smollm3 = ("model.config.model_type=smollm3", "model.config.num_key_value_heads=2")
    assert "no model of its own for smollm3" in refusal(programs.sglang, place, SGLANG, *smollm3)
    yarn = "model.config.rope_scaling={rope_type = 'yarn', factor = 2.0, attention_factor = 1.5}"
    assert "passes over attention_factor" in refusal(programs.sglang, place, SGLANG, yarn)


def test_an_interpreter_without_sglang_is_no_engine(place: Path) -> None:
    python = f"rollout.sglang_python={sys.executable}"
    if programs.without(Path(sys.executable), "sglang"):
        assert "has no package sglang" in refusal(programs.sglang, place, SGLANG, python)
    broken = script(place.parent / "bin/python", "echo cannot start >&2; exit 4")
    broken_python = f"rollout.sglang_python={broken}"
    assert "does not work: cannot start" in refusal(programs.sglang, place, SGLANG, broken_python)
    broken.chmod(0o644)
    said = refusal(programs.sglang, place, SGLANG, broken_python)
    assert "is not executable" in said and said.startswith("--set rollout.sglang_python")
    assert programs.without(Path(sys.executable), "json") == ""


def test_the_interpreter_of_the_models_code_has_what_the_job_imports(place: Path) -> None:
    python = f"sandbox.python={sys.executable}"
    programs.sandbox(read(place, python, 'sandbox.imports=["json", "math"]'))
    said = refusal(programs.sandbox, place, python, 'sandbox.imports=["json", "nothing_there"]')
    assert said.startswith("--set sandbox.imports") and "No module named 'nothing_there'" in said
    other = script(place.parent / "bin/python", "exit 3")
    assert "sandbox.python" in refusal(programs.sandbox, place, f"sandbox.python={other}")


def test_commands_of_mcp_servers_are_there(place: Path) -> None:
    (place.parent / "server.py").write_text("")
    good = f'environment.mcp={{a = ["python", "server.py"], b = ["{sys.executable}"]}}'
    programs.servers(read(place, good))
    said = refusal(programs.servers, place, 'environment.mcp={a = ["no-such-program", "x"]}')
    assert "environment.mcp.a: there is no program 'no-such-program'" in said
    said = refusal(programs.servers, place, 'environment.mcp={a = ["python", "nothing.py"]}')
    assert f"there is no file {place.parent}/nothing.py" in said


def test_a_gpu_that_is_not_there_is_said_with_what_the_driver_says(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.present(read(place))
    cuda = "mesh.device=cuda"
    path = place.parent / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    assert "there is no nvidia-smi" in refusal(devices.present, place, cuda)
    words = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    script(path / "nvidia-smi", f'echo "{words}"; exit 9')
    said = refusal(devices.present, place, cuda)
    assert words in said and said.startswith("--set mesh.device=cuda")
    script(path / "nvidia-smi", "")
    assert "lists no GPU" in refusal(devices.present, place, cuda)


@pytest.mark.skipif(devices.built_for_cuda(), reason="this torch has CUDA")
def test_a_torch_without_cuda_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "nvidia-smi", "echo NVIDIA H100")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="built without CUDA, and this host has NVIDIA H100"):
        devices.usable("cuda")


@pytest.mark.skipif(not devices.built_for_cuda(), reason="this torch has no CUDA")
@pytest.mark.needs("cuda")
def test_a_gpu_that_is_there_is_usable() -> None:
    devices.usable("cuda")
