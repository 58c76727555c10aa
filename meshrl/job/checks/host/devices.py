"""Checks that a mesh's accelerators are present, and that torch can use them."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.hardware.gpus.selection import DRIVER_TIMEOUT_S, check_device_count
from meshrl.common.hardware.gpus.visibility import CUDA_ENV
from meshrl.job.job_file import JobFile

IMPORT_TIMEOUT_S = 60.0  # for torch
LIST_COMMAND = [sys.executable, "-m", "meshrl.common.hardware.gpus"]
CUDA_PROBE = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name(0))"
_FIX = 'Set mesh.device = "cpu", or repair the access to the GPU'


def check_devices(job: JobFile) -> None:
    """Check that the mesh of the job has its GPUs, one for each worker."""
    mesh = job.config.mesh
    try:
        find_usable_devices(mesh.device, mesh.workers)
    except ConfigError as error:
        key = "mesh.workers" if error.where == "mesh.workers" else "mesh.device"
        raise job.make_error(key, f"{key}: {error.message}", error.fix) from error


def find_usable_devices(device: str, workers: int = 0) -> list[Device]:
    """Return the GPUs that workers would compute on, none for `device` cpu.

    Raises ConfigError with the examined causes (driver, environment, torch's build) when there are
    none, fewer than `workers`, or torch cannot use them.
    """
    if device != "cuda":
        return []
    try:
        devices = list_devices()
    except ConfigError as error:
        value = os.environ.get(CUDA_ENV)
        visible = f"{CUDA_ENV} is not set" if value is None else f"{CUDA_ENV}={value!r}"
        message = f"{error.message}; {visible}; torch {describe_torch_build()}"
        raise ConfigError(message, where=error.where, fix=_FIX) from error
    check_device_count(devices, workers)
    if not is_torch_built_for_cuda():
        raise ConfigError(
            f"torch in {sys.prefix} is built without CUDA, but this host has "
            + ", ".join(one.label for one in devices),
            fix="Install torch with CUDA: see https://pytorch.org/get-started",
        )
    _run_command(
        [sys.executable, "-c", CUDA_PROBE], IMPORT_TIMEOUT_S, "torch", {CUDA_ENV: devices[0].uuid}
    )
    return devices


def list_devices() -> list[Device]:
    """Return this host's usable devices; raise ConfigError with the reason if there are none.

    Runs another process, which may hang with the driver.
    """
    found = json.loads(_run_command(LIST_COMMAND, DRIVER_TIMEOUT_S, "the driver")[0])["devices"]
    return [Device(**one | {"instance": tuple(one["instance"])}) for one in found]


def is_torch_built_for_cuda() -> bool:
    """Return True if the installed torch is built for CUDA; importing it would take seconds."""
    return describe_torch_build().startswith("is built for CUDA")


def describe_torch_build() -> str:
    """Return the build of the installed torch, as the end of a sentence."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version is None or not version.is_file():
        return "is not installed"
    cuda = runpy.run_path(str(version)).get("cuda")
    return f"is built for CUDA {cuda}" if cuda else "is built without CUDA"


def _run_command(
    command: list[str], deadline_s: float, program: str, environment: Mapping[str, str] = {}
) -> list[str]:
    """Return a program's output lines; raise ConfigError with its last words if it failed."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            env={**os.environ, **environment},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{program} did not respond: {error}", where="mesh.device", fix=_FIX
        ) from error
    if result.returncode:
        words = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise ConfigError(
            words[-1] if words else f"{program} failed with exit status {result.returncode}",
            fix=_FIX,
        )
    return result.stdout.strip().splitlines()
