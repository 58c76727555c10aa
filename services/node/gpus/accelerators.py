"""What this host computes on: its GPUs, or a number of CPU slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.hardware.gpus.found import ANSWER_S, enough, ours
from meshrl.common.hardware.gpus.visible import CUDA
from meshrl.common.hardware.profiles import CPU, declared, kind_of
from meshrl.common.mesh.process.host import Host


@dataclass(frozen=True)
class WorkerAccelerator:
    name: str  # "cpu:0", "cuda:0 NVIDIA H200"
    env: Mapping[str, str] = field(default_factory=dict)  # what lets a process see only this one
    bytes: int = 0  # of its memory; 0: not known
    device: Device | None = None  # of a GPU


def cpu_slots(count: int, stand_for: Sequence[str] = ()) -> list[WorkerAccelerator]:
    """Slots of one thread each: two would fight for the cores of a small machine. The first ones
    `stand_for` accelerators of these kinds. ConfigError where none is declared, or no such slot is.
    """
    kinds = [kind_of(name) for name in stand_for]
    for name, kind in zip(stand_for, kinds, strict=True):
        if kind in ("", CPU):
            known = ", ".join(kind for kind in declared() if kind != CPU)
            raise _cannot(f"no accelerator {name!r} is declared", f"one of {known}")
    if len(kinds) > count:
        raise _cannot(f"{len(kinds)} kinds are named for {count} slots", "as many as --workers")
    names = [
        f"cpu:{i} {kind}".rstrip() for i, kind in zip_longest(range(count), kinds, fillvalue="")
    ]
    return [WorkerAccelerator(name, {"OMP_NUM_THREADS": "1"}) for name in names]


def _cannot(message: str, fix: str) -> ConfigError:
    return ConfigError(message, where="--stand-for, $MESHRL_STAND_FOR", fix=f"name {fix}")


def of_gpus(devices: list[Device], count: int) -> list[WorkerAccelerator]:
    """An accelerator for each of the first `count` devices; for all if `count` is 0. ConfigError
    when there are fewer. A process sees its own by UUID, which means the same in every order.
    """
    enough(devices, count)
    return [
        WorkerAccelerator(device.label, {CUDA: device.uuid}, device.memory, device)
        for device in devices[: count or None]
    ]


async def discover(
    host: Host, device: str, workers: int, stand_for: Sequence[str] = ()
) -> list[WorkerAccelerator]:
    """The accelerators of `device` ("cpu" or "cuda"); ConfigError if there are none, or fewer than
    `workers`. `stand_for`: see `cpu_slots`; GPUs stand for nothing else.
    """
    if device == "cpu":
        return cpu_slots(workers, stand_for)
    if stand_for:
        raise _cannot(f"accelerators of {device} are what they are", "none, or --device cpu")
    return of_gpus(await host.run_blocking(ours, deadline_s=ANSWER_S), workers)
