"""Monitor of a host's GPUs.

NVML readings become statistics of the agent. An uncorrected error or a lost GPU becomes an event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.hardware.gpus import nvml
from meshrl.common.hardware.gpus.devices import Device, DeviceReading
from meshrl.common.mesh.runtime.mesh import Mesh

READ_S = 5.0  # between two readings: a few milliseconds of the driver's time for a GPU
DRIVER_TIMEOUT_S = (
    30.0  # the driver answers at once, or hangs with a GPU that has fallen off the bus
)
EVENT = "gpu"  # kind of event; `what` says which: lost | back | errors
# Names of figures in the stats, by those of a reading.
STAT_NAMES = {
    "used": "gpu_used_bytes",
    "total": "gpu_total_bytes",
    "utilization": "gpu_utilization",
    "temperature_c": "gpu_temperature_celsius",
    "power_w": "gpu_power_watts",
    "ecc_uncorrected": "gpu_ecc_uncorrected",
}

AppendEvent = Callable[[str, dict[str, Any]], Awaitable[None]]  # kind and fields of an event


@dataclass
class WatchedDevice:
    """Last known state of a worker's device."""

    device: Device
    reading: DeviceReading = field(default_factory=DeviceReading)
    reported_ecc_errors: int = 0  # uncorrected errors reported so far
    last_xid: int = 0  # of the last error; 0: none


class GpuWatch:
    """Monitor of a host's GPUs; it makes one driver call at a time, however long a call takes."""

    def __init__(
        self, mesh: Mesh, devices: Mapping[str, Device], append_event: AppendEvent
    ) -> None:
        """Create a monitor of the devices, which are given by worker name."""
        self._mesh, self._append_event = mesh, append_event
        self._devices = {worker: WatchedDevice(device) for worker, device in devices.items()}
        self._session = DriverSession([monitored.device for monitored in self._devices.values()])

    async def run(self) -> None:
        """Read the devices every READ_S seconds until cancelled; return at once without devices."""
        try:
            while self._devices:
                await self._poll()
                await self._mesh.clock.sleep(READ_S)
        finally:
            if not self._session.is_busy:
                self._session.close()

    def stats(self) -> dict[str, Any]:
        """Return the figures of the last reading: by stat name, then by worker; empty without a
        GPU.
        """
        figures: dict[str, Any] = {}
        for worker, monitored in self._devices.items():
            reading = monitored.reading
            for name, key in STAT_NAMES.items():
                if (value := getattr(reading, name)) is not None:
                    figures.setdefault(key, {})[worker] = value
            if reading.throttled is not None:
                figures.setdefault("gpu_throttled", {})[worker] = len(reading.throttled)
                figures.setdefault("gpu_throttle_reasons", {})[worker] = list(reading.throttled)
            figures.setdefault("gpu_lost", {})[worker] = int(bool(reading.lost))
            figures.setdefault("gpu_xid", {})[worker] = monitored.last_xid
        return figures

    async def _poll(self) -> None:
        if self._session.is_busy:  # the abandoned call still hangs in the driver
            return
        run = self._mesh.host.run_blocking
        try:
            readings, errors = await run(self._session.read_devices, deadline_s=DRIVER_TIMEOUT_S)
        except (MeshError, OSError) as error:
            is_timeout = isinstance(error, DeadlineExceeded)
            why = (
                f"the driver has not answered for {DRIVER_TIMEOUT_S:g} s"
                if is_timeout
                else str(error)
            )
            readings, errors = [DeviceReading(lost=why) for _ in self._devices], []
        for (worker, monitored), reading in zip(self._devices.items(), readings, strict=True):
            xids = [xid for uuid, xid in errors if uuid == monitored.device.gpu_uuid]
            await self._update_device(worker, monitored, reading, xids)

    async def _update_device(
        self, worker: str, monitored: WatchedDevice, reading: DeviceReading, xids: list[int]
    ) -> None:
        """Store a reading; report a lost or returned device, XID errors, and new ECC errors."""
        previous, monitored.reading = monitored.reading, reading
        if reading.lost and not previous.lost:
            await self._report_event(worker, monitored, "lost", why=reading.lost)
        if previous.lost and not reading.lost:
            await self._report_event(
                worker, monitored, "back", why="the driver reaches the device again"
            )
        count = reading.ecc_uncorrected or 0
        if count < monitored.reported_ecc_errors:  # the driver reloaded, and its counters restarted
            monitored.reported_ecc_errors = 0
        if xids or count > monitored.reported_ecc_errors:
            monitored.last_xid = xids[-1] if xids else monitored.last_xid
            new_errors = count - monitored.reported_ecc_errors
            monitored.reported_ecc_errors = count
            await self._report_event(worker, monitored, "errors", uncorrected=new_errors, xids=xids)

    async def _report_event(
        self, worker: str, monitored: WatchedDevice, what: str, **fields: Any
    ) -> None:
        device = monitored.device
        device_fields = {"worker": worker, "gpu": device.label, "uuid": device.uuid, "what": what}
        self._mesh.telemetry.log.error("gpu", **device_fields, **fields)
        await self._append_event(EVENT, device_fields | fields)


class DriverSession:
    """Driver handle that stays open between polls.

    It is reopened after a failed poll, or one that found a GPU lost, which may have been reset.
    """

    def __init__(self, devices: list[Device]) -> None:
        self.is_busy = False  # a poll is in progress
        self._devices = devices
        self._handle: tuple[ExitStack, nvml.NvmlDriver, nvml.ErrorReader] | None = None

    def read_devices(self) -> tuple[list[DeviceReading], list[tuple[str, int]]]:
        """Read each device, and the errors (UUID, XID) since the last poll. Blocking.

        Driver errors raise NoDriver or GpuQueryFailed.
        """
        self.is_busy = True
        try:
            _, driver, errors = self._handle = self._handle or self._open_driver()
            readings, new_errors = [driver.read(device) for device in self._devices], errors()
            if any(reading.lost for reading in readings):
                self.close()
            return readings, new_errors
        except BaseException:
            self.close()
            raise
        finally:
            self.is_busy = False

    def close(self) -> None:
        """Close the driver, if it is open; the next read opens it again."""
        if self._handle is not None:
            stack, self._handle = self._handle[0], None
            stack.close()

    def _open_driver(self) -> tuple[ExitStack, nvml.NvmlDriver, nvml.ErrorReader]:
        with ExitStack() as stack:
            driver = stack.enter_context(nvml.open_driver())
            errors = stack.enter_context(driver.watch_errors(self._devices))
            return stack.pop_all(), driver, errors
