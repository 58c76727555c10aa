"""Selection of this host's GPUs for its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.gpus import nvml
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.hardware.gpus.visibility import explain_no_devices, select_visible

DRIVER_TIMEOUT_S = 30.0  # the driver initialises unused GPUs, which takes up to seconds each


def select_devices(environment: Mapping[str, str] = os.environ) -> list[Device]:
    """Return every device to compute on, at least one. Blocks.

    NoDriver if there is no driver. ConfigError if there is no device, or if the environment names a
    missing one.
    """
    with nvml.open_driver() as opened:
        devices = opened.list_devices()
    found = select_visible(devices, environment)
    if not found:
        raise ConfigError(
            f"there is no GPU to compute on: {explain_no_devices(devices, environment)}",
            where="mesh.device",
            fix='Request GPUs from the resource manager, or set mesh.device = "cpu"',
        )
    return found


def check_device_count(devices: list[Device], workers: int, where: str = "mesh.workers") -> None:
    """Raise ConfigError if there are more workers than devices.

    Two workers on one GPU would run out of its memory, and cannot train together.
    """
    if workers > len(devices):
        named = ", ".join(device.label for device in devices)
        most = "1 worker, which core and engine share in time slices"
        if len(devices) > 1:
            most = f"{len(devices)} workers"
        raise ConfigError(
            f"{workers} workers are requested, but there are {len(devices)} GPUs ({named}): each "
            "worker needs its own",
            where=where,
            fix=f"Request {most}, or more GPUs",
        )
