"""CUDA kernels that are compiled ahead of time: their build, their choice, and the fallback."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshrl.commands import doctor
from meshrl.kernels import cuda_build
from meshrl.kernels.backends import cuda
from meshrl.kernels.backends.cuda_launchers import SIGNATURES
from meshrl.kernels.backends.kernel_unsupported import KernelUnsupported
from meshrl.kernels.ops import dispatch
from tests.load import scaled

HOPPER = (9, 0)
SEARCH_PATH = os.environ.get("PATH", "")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "cc")


@pytest.fixture
def native_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide $MESHRL_NATIVE as a host with a torch of CUDA 13 has it, without tools of CUDA."""
    monkeypatch.setenv("MESHRL_NATIVE", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda.build_library.cache_clear()
    yield tmp_path
    cuda.build_library.cache_clear()


def write_library(folder: Path, cuda_major: str = "13") -> Path:
    """Write a loadable library under the name of the prebuilt kernels."""
    source = folder / "launchers.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in SIGNATURES))
    path = folder / cuda_build.get_file_name(cuda_major)
    command = [COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)]
    environment = {**os.environ, "PATH": SEARCH_PATH}
    subprocess.run(command, check=True, timeout=scaled(60), env=environment)
    return path


@pytest.mark.needs("compiler")
def test_prebuilt_kernels_are_loaded_without_tools(native_folder: Path) -> None:
    path = write_library(native_folder)
    assert cuda_build.find_prebuilt("13.0", [HOPPER, (8, 0), (8, 9), (12, 0)]).path == path
    library = cuda.build_library()
    assert isinstance(library, ctypes.CDLL) and library._name == str(path)
    finding = next(line for line in doctor.run_checks() if line.subject == doctor.CUDA_KERNELS)
    assert (finding.level, finding.detail) == (doctor.OK, f"prebuilt ({path})")


@pytest.mark.parametrize(
    ("cuda_version", "capability", "reason"),
    [
        ("12.8", HOPPER, "has no CUDA kernels of this version for CUDA 12.8"),
        (None, HOPPER, "for a torch without CUDA"),
        ("13.0", (7, 5), "has no code for compute capability 7.5"),
    ],
)
def test_prebuilt_kernels_that_do_not_fit_are_not_loaded(
    native_folder: Path, cuda_version: str | None, capability: tuple[int, int], reason: str
) -> None:
    path = native_folder / cuda_build.get_file_name("13")
    path.write_bytes(b"")
    path.chmod(0o755)
    found = cuda_build.find_prebuilt(cuda_version, [HOPPER, capability])
    assert found.path is None and reason in found.reason
    assert cuda_build.find_prebuilt("13.0", [HOPPER]).path == path
    path.chmod(0o777)  # others may write to it
    assert cuda_build.find_prebuilt("13.0", [HOPPER]).path is None


def test_unloadable_kernels_fall_back_to_pytorch_with_one_message(
    native_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = native_folder / cuda_build.get_file_name("13")
    path.write_bytes(b"no library")
    path.chmod(0o755)
    with pytest.raises(KernelUnsupported) as declined:
        cuda.get_launchers(torch.device("cpu"))
    assert "the prebuilt CUDA kernels cannot be loaded" in declined.value.reason
    assert "the CUDA sources cannot be built" in declined.value.reason
    dispatch.log_fallback_once.cache_clear()
    for _ in range(3):
        dispatch.log_fallback_once("cuda", declined.value.reason)
    (message,) = [line for line in caplog.messages if "plain PyTorch" in line]
    assert declined.value.reason in message
    finding = next(line for line in doctor.run_checks() if line.subject == doctor.CUDA_KERNELS)
    assert finding.level == doctor.NOTE and "no nvcc, no ninja to compile them" in finding.detail
    assert "python -m meshrl.kernels FOLDER --cuda" in finding.fix


def test_build_without_nvcc_is_rejected(native_folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no nvcc"):
        cuda_build.build_for_all_gpus(native_folder)


@pytest.mark.deep
@pytest.mark.needs("nvcc")
@pytest.mark.timeout(600)
def test_kernels_are_compiled_for_every_generation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshrl.kernels", str(tmp_path), "--cuda"]
    subprocess.run(command, check=True, timeout=scaled(500))
    [built] = tmp_path.iterdir()
    major = re.match(r"cuda(\d+)-", built.name)
    assert major and built.name == cuda_build.get_file_name(major[1])
    content = built.read_bytes()
    targets = {match[0].decode() for match in re.finditer(rb"(sm|compute)_\d+", content)}
    assert {"sm_80", "sm_90", "sm_100", "compute_100"} <= targets
    assert f"libcudart.so.{major[1]}".encode() in content  # the one that torch has loaded
    assert all(name.encode() in content for name in SIGNATURES)
