"""What this host computes on: its GPUs, or a number of CPU slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.gpus.devices import Device
from common.gpus.found import ANSWER_S, enough, ours
from common.gpus.visible import CUDA
from common.process.host import Host


@dataclass(frozen=True)
class Accelerator:
    name: str  # "cpu:0", "cuda:0 NVIDIA H200"
    env: Mapping[str, str] = field(default_factory=dict)  # what lets a process see only this one
    bytes: int = 0  # of its memory; 0: not known
    device: Device | None = None  # of a GPU


def cpu_slots(count: int) -> list[Accelerator]:
    """Slots of one thread each: two would fight for the cores of a small machine."""
    return [Accelerator(f"cpu:{i}", {"OMP_NUM_THREADS": "1"}) for i in range(count)]


def of_gpus(devices: list[Device], count: int) -> list[Accelerator]:
    """An accelerator for each of the first `count` devices; for all if `count` is 0. ConfigError
    when there are fewer. A process sees its own by UUID, which means the same in every order.
    """
    enough(devices, count)
    return [
        Accelerator(device.label, {CUDA: device.uuid}, device.memory, device)
        for device in devices[: count or None]
    ]


async def discover(host: Host, device: str, workers: int) -> list[Accelerator]:
    """The accelerators of `device` ("cpu" or "cuda"); ConfigError if there are none, or fewer than
    `workers`.
    """
    if device == "cpu":
        return cpu_slots(workers)
    return of_gpus(await host.run_blocking(ours, deadline_s=ANSWER_S), workers)
