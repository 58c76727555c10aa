"""A GPU, or an instance of one under MIG, and how it does: plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """What CUDA computes on: a GPU, or an instance of one."""

    uuid: str  # GPU-..., or MIG-... of an instance
    name: str
    memory: int  # bytes; 0: it shares the host's
    index: int  # of the GPU, as the driver counts: by PCI bus
    parent: str = ""  # UUID of the GPU that an instance is a part of
    instance: tuple[int, int] = (0, 0)  # numbers of its GPU instance and its compute instance
    sliced: bool = False  # a GPU in MIG mode, which computes by its instances alone
    lost: str = ""  # why the driver cannot reach it

    @property
    def gpu_uuid(self) -> str:
        """The UUID of the GPU, also of an instance of it."""
        return self.parent or self.uuid

    @property
    def label(self) -> str:
        """As people name it: `cuda:0 NVIDIA H100`, of an instance `cuda:0/7/0 ...`."""
        part = "/{}/{}".format(*self.instance) if self.parent else ""
        return f"cuda:{self.index}{part} {self.name}"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """How a device does; None for what its driver does not tell of it.

    Of an instance memory is its own; what the others say holds for its whole GPU.
    """

    used: int | None = None  # bytes, whoever has them
    total: int | None = None  # bytes
    utilization: float | None = None  # share of the last sampling period in which a kernel ran
    temperature_c: int | None = None
    power_w: float | None = None
    ecc_uncorrected: int | None = None  # errors since the driver was loaded
    throttled: tuple[str, ...] | None = None  # why its clocks are lower than they could be
    lost: str = ""  # why there is no reading: the driver does not reach it

    def to_document(self) -> dict[str, Any]:
        """What is known, under the names that people and programs read."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that has memory of a device."""

    pid: int  # as the driver counts: the host's, also where containers count otherwise
    used_bytes: int | None  # None: the driver does not tell
    name: str = ""  # of its program, if the driver tells


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory, and who has it."""

    free_bytes: int  # bytes
    total_bytes: int
    processes: tuple[DeviceProcess, ...] = ()
