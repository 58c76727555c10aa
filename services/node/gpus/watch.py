"""Looks after a host's GPUs: what NVML tells of each goes to the agent's stats, and what a person
has to know, an uncorrected error or a lost GPU, becomes an event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.hardware.gpus import driver
from meshrl.common.hardware.gpus.devices import Device, Reading
from meshrl.common.mesh.runtime.mesh import Mesh

READ_S = 5.0  # between two readings: a few milliseconds of the driver's time for a GPU
ANSWER_S = 30.0  # the driver answers at once, or hangs with a GPU that has fallen off the bus
EVENT = "gpu"  # kind of event; `what` says which: lost | back | errors
# Names of figures as stats have them, by those of a reading.
FIGURES = {
    "used": "gpu_used_bytes",
    "total": "gpu_total_bytes",
    "utilization": "gpu_utilization",
    "temperature_c": "gpu_temperature_celsius",
    "power_w": "gpu_power_watts",
    "ecc_uncorrected": "gpu_ecc_uncorrected",
}

Tell = Callable[[str, dict[str, Any]], Awaitable[None]]  # kind and fields of an event


@dataclass
class WatchedDevice:
    """What has been seen of a worker's device so far."""

    device: Device
    reading: Reading = field(default_factory=Reading)
    errors: int = 0  # uncorrected ones that have been told
    xid: int = 0  # of the last error; 0: none


class GpuWatch:
    """One call of the driver at a time, whatever it takes."""

    def __init__(self, mesh: Mesh, devices: Mapping[str, Device], tell: Tell) -> None:
        """`devices` by worker."""
        self._mesh, self._tell = mesh, tell
        self._seen = {worker: WatchedDevice(device) for worker, device in devices.items()}
        self._session = DriverSession([seen.device for seen in self._seen.values()])

    async def run(self) -> None:
        try:
            while self._seen:
                await self._look()
                await self._mesh.clock.sleep(READ_S)
        finally:
            if not self._session.busy:
                self._session.close()

    def stats(self) -> dict[str, Any]:
        """A table by worker for each figure that the driver tells; nothing without a GPU."""
        found: dict[str, Any] = {}
        for worker, seen in self._seen.items():
            reading = seen.reading
            for name, key in FIGURES.items():
                if (value := getattr(reading, name)) is not None:
                    found.setdefault(key, {})[worker] = value
            if reading.throttled is not None:
                found.setdefault("gpu_throttled", {})[worker] = len(reading.throttled)
                found.setdefault("gpu_throttle_reasons", {})[worker] = list(reading.throttled)
            found.setdefault("gpu_lost", {})[worker] = int(bool(reading.lost))
            found.setdefault("gpu_xid", {})[worker] = seen.xid
        return found

    async def _look(self) -> None:
        if self._session.busy:  # the call that was given up still hangs in the driver
            return
        run = self._mesh.host.run_blocking
        try:
            readings, errors = await run(self._session.look, deadline_s=ANSWER_S)
        except (MeshError, OSError) as error:
            late = isinstance(error, DeadlineExceeded)
            why = f"the driver does not answer for {ANSWER_S:g} s" if late else str(error)
            readings, errors = [Reading(lost=why) for _ in self._seen], []
        for (worker, seen), reading in zip(self._seen.items(), readings, strict=True):
            xids = [xid for uuid, xid in errors if uuid == seen.device.gpu]
            await self._compare(worker, seen, reading, xids)

    async def _compare(
        self, worker: str, seen: WatchedDevice, reading: Reading, xids: list[int]
    ) -> None:
        before, seen.reading = seen.reading, reading
        if reading.lost and not before.lost:
            await self._told(worker, seen, "lost", why=reading.lost)
        if before.lost and not reading.lost:
            await self._told(worker, seen, "back", why="the driver reaches it again")
        count = reading.ecc_uncorrected or 0
        if count < seen.errors:  # the driver was loaded again, and counts anew
            seen.errors = 0
        if xids or count > seen.errors:
            seen.xid = xids[-1] if xids else seen.xid
            more = count - seen.errors
            seen.errors = count
            await self._told(worker, seen, "errors", uncorrected=more, xids=xids)

    async def _told(self, worker: str, seen: WatchedDevice, what: str, **fields: Any) -> None:
        device = seen.device
        about = {"worker": worker, "gpu": device.label, "uuid": device.uuid, "what": what}
        self._mesh.telemetry.log.error("gpu", **about, **fields)
        await self._tell(EVENT, about | fields)


class DriverSession:
    """The driver, open from one look to the next; opened anew after one that failed, or found a GPU
    lost: it may have been reset.
    """

    def __init__(self, devices: list[Device]) -> None:
        self.busy = False  # a look is under way
        self._devices = devices
        self._open: tuple[ExitStack, driver.Driver, driver.Errors] | None = None

    def look(self) -> tuple[list[Reading], list[tuple[str, int]]]:
        """A reading of each device, and the errors (UUID, XID) since the last look. It blocks; what
        the driver refuses raises NoDriver or GpuTrouble.
        """
        self.busy = True
        try:
            _, opened, errors = self._open = self._open or self._opened()
            readings, news = [opened.reading(device) for device in self._devices], errors()
            if any(reading.lost for reading in readings):
                self.close()
            return readings, news
        except BaseException:
            self.close()
            raise
        finally:
            self.busy = False

    def close(self) -> None:
        if self._open is not None:
            stack, self._open = self._open[0], None
            stack.close()

    def _opened(self) -> tuple[ExitStack, driver.Driver, driver.Errors]:
        with ExitStack() as stack:
            opened = stack.enter_context(driver.opened())
            errors = stack.enter_context(opened.errors(self._devices))
            return stack.pop_all(), opened, errors
