"""CUDA sources, and their build ahead of time for hosts without nvcc, such as images.

`python -m meshrl.kernels FOLDER --cuda` compiles them for several generations of GPUs; a host that
has the folder in $MESHRL_NATIVE loads the result. Its name has the major version of CUDA and a
digest of the sources and flags, so that no library of another version is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from meshrl.kernels.library_build import (
    PREBUILD_TIMEOUT_S,
    SOURCE_DIRECTORY,
    Library,
    install_compiled,
)
from meshrl.kernels.prebuilt_libraries import DIRECTORY_VARIABLE, ROOT_UID, is_trusted

CUDA_SOURCES = tuple(SOURCE_DIRECTORY / name for name in ("bucket.cu", "paged_decode.cu"))
NVCC_FLAGS = ("-O3", "-std=c++20")
# Machine code for A100, H100 and H200, and B200, which later GPUs of each generation run as well.
# Newer generations compile the portable code of the last at their first start.
ARCHITECTURE_FLAGS = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=[sm_100,compute_100]",
)
OLDEST_CAPABILITY = (8, 0)
PREBUILD_FLAGS = (*NVCC_FLAGS, *ARCHITECTURE_FLAGS, "-shared", "-Xcompiler=-fPIC", "-cudart=none")
NO_NVCC_REASON = "no nvcc on PATH or in $CUDA_HOME/bin"
VERSION_TIMEOUT_S = 60.0


def get_cuda_home() -> Path:
    """Return the folder of CUDA's tools, which may not exist."""
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")


def find_nvcc() -> str | None:
    """Return the path of CUDA's compiler, as torch finds it."""
    own = get_cuda_home() / "bin/nvcc"
    return str(own) if own.is_file() else shutil.which("nvcc")


def list_missing_tools() -> list[str]:
    """Return the names of the missing tools by which torch builds the sources at first use."""
    found = {"nvcc": find_nvcc(), "ninja": shutil.which("ninja")}
    return [name for name, path in found.items() if path is None]


def build_for_all_gpus(folder: Path) -> Path:
    """Compile the CUDA sources for `ARCHITECTURE_FLAGS` into the folder; return the library.

    Raise FileNotFoundError without nvcc, CalledProcessError if the compilation fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise FileNotFoundError(NO_NVCC_REASON)
    folder.mkdir(parents=True, exist_ok=True)
    major = _read_major_version(nvcc)
    path = folder / get_file_name(major)
    # Wheels have no libcudart.so, and nvcc does not search their folder.
    runtime = [f"-L{get_cuda_home() / name}" for name in ("lib64", "lib")]
    runtime.append(f"-l:libcudart.so.{major}")
    command = [nvcc, *PREBUILD_FLAGS, *map(str, CUDA_SOURCES), *runtime]
    install_compiled(command, path, 0o755, PREBUILD_TIMEOUT_S)
    return path


def get_file_name(cuda_major: str) -> str:
    """Return the file name of the library that is built for this major version of CUDA."""
    hasher = hashlib.sha256()
    for part in PREBUILD_FLAGS:
        hasher.update(part.encode() + b"\0")
    for source in CUDA_SOURCES:
        hasher.update(source.read_bytes())
    return f"cuda{cuda_major}-{hasher.hexdigest()[:20]}.so"


def find_prebuilt(cuda_version: str | None, capabilities: Iterable[tuple[int, int]]) -> Library:
    """Return the prebuilt library for torch's CUDA version and these GPUs, or why none fits.

    The reason is empty without $MESHRL_NATIVE.
    """
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if not folder:
        return Library(None)
    path = Path(folder, get_file_name((cuda_version or "").partition(".")[0]))
    if not is_trusted(path, ROOT_UID):
        built_for = f"CUDA {cuda_version}" if cuda_version else "a torch without CUDA"
        return Library(None, f"{folder} has no CUDA kernels of this version for {built_for}")
    older = [
        f"{major}.{minor}" for major, minor in capabilities if (major, minor) < OLDEST_CAPABILITY
    ]
    if older:
        return Library(None, f"{path} has no code for compute capability {', '.join(older)}")
    return Library(path)


def _read_major_version(nvcc: str) -> str:
    text = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
    ).stdout
    found = re.search(r"release (\d+)\.", text)
    if found is None:
        raise FileNotFoundError(f"{nvcc} --version names no release: {text.strip()[-200:]}")
    return found[1]
