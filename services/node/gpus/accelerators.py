"""Accelerators of this host: its GPUs, or a number of CPU slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import CPU, load_accelerators, match_kind
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.hardware.gpus.selection import (
    DRIVER_TIMEOUT_S,
    check_device_count,
    select_devices,
)
from meshrl.common.hardware.gpus.visibility import CUDA_ENV
from meshrl.common.mesh.process.host import Host


@dataclass(frozen=True)
class WorkerAccelerator:
    """Accelerator of one worker: a GPU, or a CPU slot."""

    name: str  # "cpu:0", "cuda:0 NVIDIA H200"
    env: Mapping[str, str] = field(default_factory=dict)  # limits a process to this device
    memory_bytes: int = 0  # of its memory; 0: unknown
    device: Device | None = None  # of a GPU


def list_cpu_slots(count: int, emulated_kinds: Sequence[str] = ()) -> list[WorkerAccelerator]:
    """Return CPU slots of one thread each, as two threads would compete for a small machine's
    cores.

    The first slots emulate accelerators of `emulated_kinds`.

    Raises:
        ConfigError: A kind is not declared, or has no slot.
    """
    kinds = [match_kind(name) for name in emulated_kinds]
    for name, kind in zip(emulated_kinds, kinds, strict=True):
        if kind in ("", CPU):
            known = ", ".join(kind for kind in load_accelerators() if kind != CPU)
            raise _config_error(f"no accelerator named {name!r} is declared", f"one of {known}")
    if len(kinds) > count:
        raise _config_error(
            f"{len(kinds)} kinds are given for {count} slots", "at most as many as --workers"
        )
    names = [
        f"cpu:{i} {kind}".rstrip() for i, kind in zip_longest(range(count), kinds, fillvalue="")
    ]
    return [WorkerAccelerator(name, {"OMP_NUM_THREADS": "1"}) for name in names]


def _config_error(message: str, fix: str) -> ConfigError:
    return ConfigError(message, where="--emulate, $MESHRL_EMULATED_ACCELERATORS", fix=f"Name {fix}")


def list_gpus(devices: list[Device], count: int) -> list[WorkerAccelerator]:
    """Return an accelerator for each of the first `count` devices, or for all if `count` is 0.

    A process sees its device by UUID, which is independent of device order. ConfigError when there
    are fewer devices.
    """
    check_device_count(devices, count)
    return [
        WorkerAccelerator(device.label, {CUDA_ENV: device.uuid}, device.memory_bytes, device)
        for device in devices[: count or None]
    ]


async def discover_accelerators(
    host: Host, device: str, workers: int, emulated_kinds: Sequence[str] = ()
) -> list[WorkerAccelerator]:
    """Return the accelerators of `device` ("cpu" or "cuda"): `workers` of them, or all GPUs if 0.

    `emulated_kinds`: see `list_cpu_slots`; GPUs emulate nothing.

    Raises:
        ConfigError: There are no accelerators, or fewer than `workers`; or GPUs are to emulate.
    """
    if device == "cpu":
        return list_cpu_slots(workers, emulated_kinds)
    if emulated_kinds:
        raise _config_error(
            f"accelerators of --device {device} cannot be emulated", "none, or use --device cpu"
        )
    return list_gpus(await host.run_blocking(select_devices, deadline_s=DRIVER_TIMEOUT_S), workers)
