"""Data of a GPU or a MIG instance, and of its readings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """CUDA device: a GPU, or a MIG instance of one."""

    uuid: str  # GPU-..., or MIG-... of an instance
    name: str
    memory_bytes: int  # bytes; 0: it shares the host's memory
    index: int  # of the GPU in the driver's order: by PCI bus
    parent: str = ""  # UUID of an instance's GPU
    instance: tuple[int, int] = (0, 0)  # ids of its GPU instance and its compute instance
    is_mig_enabled: bool = False  # a GPU in MIG mode, usable only by its instances
    lost_reason: str = ""  # why the driver cannot reach it

    @property
    def gpu_uuid(self) -> str:
        """UUID of the GPU, also for an instance of it."""
        return self.parent or self.uuid

    @property
    def label(self) -> str:
        """Label for users: `cuda:0 NVIDIA H100`, for an instance `cuda:0/7/0 ...`."""
        part = "/{}/{}".format(*self.instance) if self.parent else ""
        return f"cuda:{self.index}{part} {self.name}"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """State of a device; None for values that its driver does not report.

    For an instance the memory is its own; the other values are those of its whole GPU.
    """

    used: int | None = None  # bytes, by all processes
    total: int | None = None  # bytes
    utilization: float | None = None  # share of the last sampling period with a running kernel
    temperature_c: int | None = None
    power_w: float | None = None
    ecc_uncorrected: int | None = None  # errors since the driver was loaded
    throttled: tuple[str, ...] | None = None  # reasons for reduced clocks
    lost: str = ""  # why the driver cannot reach it, so that there is no reading

    def to_document(self) -> dict[str, Any]:
        """Return the known values, under the names that users and programs read."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """Process that uses memory of a device."""

    pid: int  # in the host's pid namespace, also for processes in containers
    used_bytes: int | None  # None: not reported by the driver
    name: str = ""  # of its program, if the driver reports it


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, and the processes that use it."""

    free_bytes: int
    total_bytes: int
    processes: tuple[DeviceProcess, ...] = ()
