"""The profile of a rank's accelerator, measured once and kept on the host."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.hardware.profiles import kind_of
from meshrl.common.hardware.zebra.profile import kind_of_table
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.trainer.initial.beginning import DTYPES
from meshrl.services.trainer.zebra.profiler import profiled

MEASURE_S = 300.0  # three curves, of which each takes up to its budget and one more pass


async def profile_of(mesh: Mesh, data: JobData) -> dict[str, Any]:
    """Return what a rank publishes of its accelerator, for the planner; or nothing."""
    accelerator = mesh.settings.accelerator
    name = kind_of(accelerator) or accelerator
    about = _about(data, name)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(mesh.settings.run_root) / "mesh" / "profiles" / f"{digest}.json"
    if (kept := _kept(path)) is not None:
        return {"profile": kept}
    training = data.config.training
    try:
        found = await mesh.host.run_blocking(
            profiled,
            model_config(data),
            torch.device(data.config.mesh.device),
            DTYPES[training.dtype],
            training.bin_tokens,
            mesh.clock,
            name,
            deadline_s=MEASURE_S,
        )
    except (RuntimeError, MeshError) as error:  # as where memory is too small
        mesh.telemetry.log.warning("no profile of this accelerator", kind=name, error=str(error))
        return {}
    told = found.told()
    path.parent.mkdir(parents=True, exist_ok=True)
    mesh.host.replace_file(path, json.dumps(told).encode())
    mesh.telemetry.log.info("profile", kind=name, backward=round(found.backward, 2))
    return {"profile": told}


def _about(data: JobData, name: str) -> dict[str, Any]:
    config, training = model_config(data), data.config.training
    shape = {key: value for key, value in asdict(config).items() if key != "source"}
    return {
        "model": shape,
        "dtype": training.dtype,
        "longest": training.bin_tokens,
        "kind": name,
        "torch": torch.__version__,
    }


def _kept(path: Path) -> dict[str, Any] | None:
    """What was measured before; None: nothing that can be read."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        kind_of_table(told["kind"], "a kept profile")
        return told if float(told["backward"]) > 0 else None
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
