"""Interface to NVIDIA's driver through NVML, whose library comes with it; CUDA is not initialised.

Every call may block on the driver, forever if a GPU has fallen off the bus: make calls off the
event loop, with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.hardware.gpus.devices import Device, DeviceMemory, DeviceProcess, DeviceReading

# Bits of nvmlClocksEventReasons that indicate a fault or a limit. Idle clocks, and clocks set by a
# user, are not included.
THROTTLE_REASONS = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
# Returns the errors since the last call: the UUID of a GPU, and the XID.
ErrorReader = Callable[[], list[tuple[str, int]]]
NO_WAIT_MS = 0  # only pending events


class NoDriver(ConfigError):
    """Error for a driver that is missing or does not answer."""

    code = "no_gpu_driver"


class GpuLost(MeshError):
    """Error for a GPU that the driver cannot reach any more, or not before a reset."""

    code = "gpu_lost"


class GpuQueryFailed(MeshError):
    """Error for a query about a GPU that the driver rejected, though the GPU is not lost."""

    code = "gpu_trouble"


DRIVER_ERRORS = NoDriver, GpuLost, GpuQueryFailed


@contextmanager
def open_driver() -> Iterator[NvmlDriver]:
    """Open the driver until the end of the block; NoDriver if there is none."""
    import pynvml  # takes 30 ms of CPU time, not needed without GPUs

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        why = {
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no libnvidia-ml.so.1, which comes with "
            "the driver (a container gets it with the capability `utility`)",
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "its kernel module is not loaded",
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "its library and its kernel module have "
            "different versions: an update needs a "
            "reboot",
        }.get(error.value, str(error))
        raise NoDriver(
            f"the NVIDIA driver is unavailable: {why}",
            where="NVML",
            fix="Repair the driver, or compute on CPUs",
        ) from error
    try:
        yield NvmlDriver(pynvml)
    finally:
        pynvml.nvmlShutdown()


class NvmlDriver:
    """Queries to NVML. All of them raise GpuQueryFailed if the driver rejects a query."""

    def __init__(self, nvml: Any) -> None:
        """Wrap `nvml`, the initialised module pynvml."""
        self._nvml = nvml
        self._lost_codes = {
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
            nvml.NVML_ERROR_GPU_NOT_FOUND,
            nvml.NVML_ERROR_NOT_FOUND,
        }
        self._unsupported_codes = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_DATA,
            nvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        }

    @property
    def version(self) -> str:
        """Version of the driver."""
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def list_devices(self) -> list[Device]:
        """Return every GPU visible to this process, in the order of the bus.

        MIG instances follow their GPU. A GPU that does not answer is `lost`.
        """
        found: list[Device] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._query_optional(self._nvml.nvmlDeviceGetHandleByIndex, index)
                if handle is not None:  # None: another user's
                    gpu = self._read_device(handle, index)
                    found += [gpu, *self._read_mig_instances(handle, gpu)]
            except (GpuLost, GpuQueryFailed) as error:
                found.append(Device("", "NVIDIA GPU", 0, index, lost_reason=error.message))
        return found

    def _read_device(self, handle: Any, index: int) -> Device:
        mode = self._query_optional(self._nvml.nvmlDeviceGetMigMode, handle)
        sliced = mode is not None and mode[0] == self._nvml.NVML_DEVICE_MIG_ENABLE
        return Device(
            self._query(self._nvml.nvmlDeviceGetUUID, handle),
            self._query(self._nvml.nvmlDeviceGetName, handle),
            self._read_total_bytes(handle),
            index,
            is_mig_enabled=sliced,
        )

    def _read_mig_instances(self, handle: Any, gpu: Device) -> Iterator[Device]:
        if not gpu.is_mig_enabled:
            return
        nvml, query = self._nvml, self._query
        for place in range(query(nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
            try:
                own = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_NOT_FOUND:  # indices may have gaps
                    continue
                raise self._to_error(nvml.nvmlDeviceGetMigDeviceHandleByIndex, error) from error
            numbers = (
                query(nvml.nvmlDeviceGetGpuInstanceId, own),
                query(nvml.nvmlDeviceGetComputeInstanceId, own),
            )
            uuid, name = query(nvml.nvmlDeviceGetUUID, own), query(nvml.nvmlDeviceGetName, own)
            yield Device(uuid, name, self._read_total_bytes(own), gpu.index, gpu.uuid, numbers)

    def _read_total_bytes(self, handle: Any) -> int:
        memory = self._query_optional(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return 0 if memory is None else int(memory.total)

    def read(self, device: Device) -> DeviceReading:
        """Return a device's current reading, with `lost` set if the GPU is lost."""
        try:
            return self._read(device)
        except GpuLost as error:
            return DeviceReading(lost=error.message)

    def _read(self, device: Device) -> DeviceReading:
        nvml = self._nvml
        own, gpu = self._find_handle(device.uuid), self._find_handle(device.gpu_uuid)
        memory = self._query_optional(nvml.nvmlDeviceGetMemoryInfo, own)
        # The driver reports no utilization for a GPU in MIG mode or its instances.
        busy = (
            None if device.parent else self._query_optional(nvml.nvmlDeviceGetUtilizationRates, own)
        )
        power = self._query_optional(nvml.nvmlDeviceGetPowerUsage, gpu)
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        why = self._query_optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
        if why is None:  # a driver before R535
            why = self._query_optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
        heat = self._query_optional(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU)
        if heat is None:  # a driver that no longer has that call
            heat = self._query_optional(
                nvml.nvmlDeviceGetTemperatureV, gpu, nvml.NVML_TEMPERATURE_GPU
            )
        return DeviceReading(
            used=None if memory is None else int(memory.used),
            total=None if memory is None else int(memory.total),
            utilization=None if busy is None else busy.gpu / 100,
            temperature_c=heat,
            power_w=None if power is None else power / 1000,
            ecc_uncorrected=self._query_optional(nvml.nvmlDeviceGetTotalEccErrors, gpu, *kinds),
            throttled=None
            if why is None
            else tuple(n for b, n in THROTTLE_REASONS.items() if why & b),
        )

    def read_memory(self, uuid: str) -> DeviceMemory | None:
        """Return a device's memory and the processes that use it.

        None for a device without memory of its own. Raises GpuLost.
        """
        nvml, handle = self._nvml, self._find_handle(uuid)
        memory = self._query_optional(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return None
        listed = [
            *(self._query_optional(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []),
            *(self._query_optional(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []),
        ]
        sizes = {one.pid: one.usedGpuMemory for one in listed}
        holders = []
        for pid, size in sorted(sizes.items(), key=lambda one: -(one[1] or 0)):
            name = ""
            # the process has exited, or its pid belongs to another process here
            with suppress(GpuLost):
                name = str(self._query_optional(nvml.nvmlSystemGetProcessName, pid) or "")
            holders.append(DeviceProcess(pid, size, name))
        return DeviceMemory(int(memory.free), int(memory.total), tuple(holders))

    @contextmanager
    def watch_errors(self, devices: list[Device]) -> Iterator[ErrorReader]:
        """Yield a function that returns the errors since its last call.

        An error is the UUID of a GPU and an XID. The list is empty if the driver reports none.
        """
        nvml = self._nvml
        events = self._query_optional(nvml.nvmlEventSetCreate)
        if events is None:
            yield list
            return
        try:
            for uuid in {device.gpu_uuid for device in devices}:
                kind = nvml.nvmlEventTypeXidCriticalError
                with suppress(GpuLost):  # reported by its reading
                    self._query_optional(
                        nvml.nvmlDeviceRegisterEvents, self._find_handle(uuid), kind, events
                    )
            yield lambda: list(self._read_events(events))
        finally:
            nvml.nvmlEventSetFree(events)

    def _read_events(self, events: Any) -> Iterator[tuple[str, int]]:
        nvml = self._nvml
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, NO_WAIT_MS)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT or error.value in self._lost_codes:
                    return
                raise GpuQueryFailed(
                    f"the driver reports no events: {error}", where="NVML"
                ) from error
            yield str(nvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)

    def _find_handle(self, uuid: str) -> Any:
        return self._query(self._nvml.nvmlDeviceGetHandleByUUID, uuid)

    def _query_optional(self, query: Callable[..., Any], *args: Any) -> Any:
        """Return the answer to a query; None if this GPU, driver or user gets none."""
        try:
            return query(*args)
        except self._nvml.NVMLError as error:
            if error.value in self._unsupported_codes:
                return None
            raise self._to_error(query, error) from error

    def _query(self, query: Callable[..., Any], *args: Any) -> Any:
        try:
            return query(*args)
        except self._nvml.NVMLError as error:
            raise self._to_error(query, error) from error

    def _to_error(self, query: Callable[..., Any], error: Any) -> MeshError:
        description = f"{query.__name__}: {error}"
        if error.value in self._lost_codes:
            return GpuLost(
                f"the driver has lost the GPU ({description})",
                where="NVML",
                fix="Run `nvidia-smi -q` and read the kernel's log; the GPU may need a reset",
            )
        return GpuQueryFailed(f"the driver rejects the query ({description})", where="NVML")
