"""Checks of the interpreters, MCP servers and devices that a job names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.job.checks.host import devices, programs
from tests.gpus.driver import DRIVER_NOT_LOADED, Gpus
from tests.load import scaled
from tests.unit.meshrl.job.machine.conftest import get_error, read

SGLANG = "rollout.engine=sglang"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_missing_sglang_error_names_the_install_command(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_ENGINES", str(place.parent / "engines"))
    programs.check_sglang(read(place))
    error = get_error(programs.check_sglang, place, SGLANG)
    assert f"no interpreter at {place.parent}/engines/sglang/bin/python" in error
    assert "meshrl engine install sglang" in error


def test_interpreter_without_sglang_is_rejected(place: Path) -> None:
    python = f"rollout.sglang_python={sys.executable}"
    if programs.explain_missing_package(Path(sys.executable), "sglang"):
        assert "has no package sglang" in get_error(programs.check_sglang, place, SGLANG, python)
    broken = script(place.parent / "bin/python", "echo cannot start >&2; exit 4")
    broken_python = f"rollout.sglang_python={broken}"
    assert "failed: cannot start" in get_error(programs.check_sglang, place, SGLANG, broken_python)
    broken.chmod(0o644)
    error = get_error(programs.check_sglang, place, SGLANG, broken_python)
    assert "is not executable" in error and error.startswith("--set rollout.sglang_python")
    assert programs.explain_missing_package(Path(sys.executable), "json") == ""


def test_sglang_on_a_cpu_has_no_kv_tiers(place: Path) -> None:
    python = f"rollout.sglang_python={script(place.parent / 'bin/python', 'exit 0')}"
    for setting in ("rollout.kv.memory=2", "rollout.kv.disk=5"):
        error = get_error(programs.check_sglang, place, SGLANG, python, setting)
        assert "only on GPUs" in error
        programs.check_sglang(read(place, setting))
        on_gpu = ("mesh.device=cuda", "rollout.dtype=bfloat16")
        programs.check_sglang(read(place, SGLANG, python, setting, *on_gpu))


def test_sglang_read_back_is_rejected_on_cpu_and_for_experts(place: Path) -> None:
    python = f"rollout.sglang_python={script(place.parent / 'bin/python', 'exit 0')}"
    reading = (SGLANG, python, "rollout.verify_weights=true")
    programs.check_sglang(read(place, *reading))
    cuda = ("mesh.device=cuda", "rollout.dtype=bfloat16")
    error = get_error(programs.check_sglang, place, *reading, *cuda)
    assert error.startswith("--set rollout.verify_weights") and "on a GPU" in error
    programs.check_sglang(read(place, SGLANG, python, *cuda))
    # the built-in engine supports it
    programs.check_sglang(read(place, "rollout.verify_weights=true", *cuda))
    experts = (
        "model.config.model_type=qwen3_moe",
        "model.config.num_experts=4",
        "model.config.num_experts_per_tok=2",
        "model.config.moe_intermediate_size=32",
        "model.config.norm_topk_prob=true",
        "model.config.decoder_sparse_step=1",
        "model.config.mlp_only_layers=[]",
        "model.config.num_key_value_heads=2",
        "model.config.router_aux_loss_coef=0.001",
    )
    assert "experts" in get_error(programs.check_sglang, place, *reading, *experts)


def test_separate_adapters_need_pinned_memory_in_sglang(place: Path) -> None:
    text = 'case "$3" in *pin_memory*) echo "no pinned memory" >&2; exit 1;; esac'
    python = f"rollout.sglang_python={script(place.parent / 'bin/python', text)}"
    asked = (SGLANG, python, "lora.rank=4")
    beside = "lora.engine_mode=beside"
    error = get_error(programs.check_sglang, place, *asked, beside)
    assert error.startswith("--set lora.engine_mode") and "no pinned memory" in error
    for fine in ((), ("lora.engine_mode=merged",), (beside, "mesh.device=cuda")):
        programs.check_sglang(read(place, *asked, *fine))
    programs.check_sglang(read(place, SGLANG, python, beside))  # the job has no adapters
    able = f"rollout.sglang_python={script(place.parent / 'other/python', 'exit 0')}"
    programs.check_sglang(read(place, SGLANG, able, "lora.rank=4", beside))


def test_slow_interpreter_is_reported_as_slow(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "IMPORT_TIMEOUT_S", 0.1)
    text = 'case "$3" in *pin_memory*) exec sleep 600;; esac'
    python = f"rollout.sglang_python={script(place.parent / 'bin/python', text)}"
    error = get_error(
        programs.check_sglang, place, SGLANG, python, "lora.rank=4", "lora.engine_mode=beside"
    )
    assert error.startswith("--set rollout.sglang_python") and "within 0.1 s" in error
    assert "has none" not in error and "merged" not in error


def test_sandbox_interpreter_has_the_jobs_imports(place: Path) -> None:
    python = f"sandbox.python={sys.executable}"
    programs.check_sandbox_python(read(place, python, 'sandbox.imports=["json", "math"]'))
    error = get_error(
        programs.check_sandbox_python, place, python, 'sandbox.imports=["json", "nothing_there"]'
    )
    assert error.startswith("--set sandbox.imports") and "No module named 'nothing_there'" in error
    other = script(place.parent / "bin/python", "exit 3")
    assert "sandbox.python" in get_error(
        programs.check_sandbox_python, place, f"sandbox.python={other}"
    )


def test_existing_mcp_commands_are_accepted(place: Path) -> None:
    (place.parent / "server.py").write_text("")
    good = f'environment.mcp={{a = ["python", "server.py"], b = ["{sys.executable}"]}}'
    programs.check_mcp_servers(read(place, good))


@pytest.mark.needs("compiler")
def test_missing_gpus_are_reported_with_the_search_result(
    place: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.check_devices(read(place))
    cuda = "mesh.device=cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    error = get_error(devices.check_devices, place, cuda)
    assert error.startswith("--set mesh.device=cuda")
    for what in ("libnvidia-ml.so.1", "CUDA_VISIBLE_DEVICES='GPU-b'", "; torch is built "):
        assert what in error
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    gpus.gpu("GPU-a")
    assert "the driver lists no GPU-b" in get_error(devices.check_devices, place, cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    error = get_error(devices.check_devices, place, cuda, "mesh.workers=3")
    assert "mesh.workers: 3 workers are requested, but there are 1 GPUs" in error
    gpus.fail_init(DRIVER_NOT_LOADED)
    assert "kernel module is not loaded" in get_error(devices.check_devices, place, cuda)


@pytest.mark.needs("compiler")
@pytest.mark.skipif(devices.is_torch_built_for_cuda(), reason="this torch has CUDA")
def test_torch_without_cuda_is_rejected(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.gpu("GPU-a")
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="built without CUDA, but this host has cuda:0 NVIDIA"):
        devices.find_usable_devices("cuda")


@pytest.mark.skipif(not devices.is_torch_built_for_cuda(), reason="this torch has no CUDA")
@pytest.mark.needs("cuda")
def test_present_gpu_is_usable() -> None:
    devices.find_usable_devices("cuda")


def test_program_checks_do_not_import_torch() -> None:
    """Check that the import is absent, because it would delay every error message."""
    code = "import sys, meshrl.job.checks.host.programs; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))
