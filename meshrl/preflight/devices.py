"""Checks that the accelerators which a mesh is to have are there, and that torch can use them."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from common.errors import ConfigError
from meshrl.job.jobfile import JobFile

ANSWER_S = 20.0  # nvidia-smi initialises the driver on its first call
IMPORT_S = 60.0  # for torch
QUERY = ["--query-gpu=name", "--format=csv,noheader"]
TRY = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name(0))"
_FIX = 'Set mesh.device = "cpu", or repair the driver'


def present(job: JobFile) -> None:
    """The mesh of the job has its GPUs."""
    try:
        usable(job.config.mesh.device)
    except ConfigError as error:
        raise job.fail("mesh.device", f"mesh.device: {error.message}", error.fix) from error


def usable(device: str) -> None:
    """ConfigError, with what driver and torch say, if workers cannot compute on `device`."""
    if device != "cuda":
        return
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise ConfigError("this host has no NVIDIA GPU: there is no nvidia-smi", fix=_FIX)
    listed = _said([tool, *QUERY], ANSWER_S, "nvidia-smi")
    if not listed:
        raise ConfigError("nvidia-smi lists no GPU", fix=_FIX)
    if not built_for_cuda():
        raise ConfigError(
            f"the torch of {sys.prefix} is built without CUDA, and this host has {listed[0]}",
            fix="Install a torch with CUDA: see https://pytorch.org/get-started",
        )
    _said([sys.executable, "-c", TRY], IMPORT_S, "torch")


def built_for_cuda() -> bool:
    """Whether the installed torch is; it is not imported, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and bool(runpy.run_path(str(version)).get("cuda"))


def _said(command: list[str], deadline_s: float, who: str) -> list[str]:
    """The lines that a program printed; ConfigError with its last words if it failed."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{who} does not answer: {error}", fix=_FIX) from error
    if ran.returncode:
        words = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
        raise ConfigError(f"{who} says: {words[-1] if words else ran.returncode}", fix=_FIX)
    return ran.stdout.strip().splitlines()
