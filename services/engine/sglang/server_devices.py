"""Devices of an SGLang server and of this process, from its description and CUDA's variables.

The server sees the GPUs that this process sees, in the same order. No context of CUDA is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshrl.common.hardware.gpus.visibility import CUDA_ENV
from meshrl.services.engine.sglang.transport_choice import PushDevices


def find_push_devices(
    about: Mapping[str, Any], device: str, gpu_count: int, environment: Mapping[str, str]
) -> PushDevices:
    """Return the devices of a server and its sender.

    Args:
        about: SGLang's description of the server (`/server_info`).
        gpu_count: GPUs that this process can use.
    """
    named = [name.strip() for name in environment.get(CUDA_ENV, "").split(",") if name.strip()]
    copies = _read_number(about, "pp_size", 1) * _read_number(about, "dp_size", 1)
    sender = tuple(named[:gpu_count] if named else map(str, range(gpu_count)))
    if device != "cuda":
        return PushDevices((), sender, copies)
    first, step = _read_number(about, "base_gpu_id", 0), _read_number(about, "gpu_id_step", 1)
    numbers = [first + step * rank for rank in range(_read_number(about, "tp_size", 1))]
    server = tuple(named[n] if n < len(named) else str(n) for n in numbers)
    return PushDevices(server, sender, copies)


def count_gpus() -> int:
    """Return the GPUs that this process's torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _read_number(about: Mapping[str, Any], name: str, default: int) -> int:
    return int(about.get(name) or default)
