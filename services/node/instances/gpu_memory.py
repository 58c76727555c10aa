"""Check of a worker's GPU for free memory, before an instance starts or wakes on it.

Other programs may have the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshrl.common.base.errors import NotFound
from meshrl.common.hardware.gpus import nvml
from meshrl.common.hardware.gpus.devices import DeviceMemory
from meshrl.common.job.memory.process_memory import CONTEXT_BYTES
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.pool.demand.requirements import derive_requirements
from meshrl.common.state.pool.demand.role_memory import derive_role_memory
from meshrl.common.state.pool.scheduling.feasibility import SliceBytes, estimate_slice_bytes
from meshrl.common.state.pool.workers.rows import Instance
from meshrl.services.node.instances.budgets import OverBudget

DRIVER_TIMEOUT_S = 30.0  # the driver answers at once, or hangs
MAX_NAMED_HOLDERS = 4  # processes listed in the error, the largest first


class GpuMemoryFull(OverBudget):
    """Error raised when a GPU has less memory free than an instance needs."""

    code = "gpu_full"


class GpuMemoryGuard:
    """Check of one GPU's free memory; without a UUID every check passes."""

    def __init__(self, mesh: Mesh, uuid: str = "") -> None:
        self._mesh, self._uuid = mesh, uuid
        # that the driver takes for each process, beside its tensors
        self.context_bytes = CONTEXT_BYTES["cuda" if uuid else "cpu"]

    async def read_total_bytes(self) -> int:
        """Return the GPU's memory; 0 without a GPU, or if the GPU shares the host's memory.

        Raises the driver's errors of `check_free`, and DeadlineExceeded.
        """
        if not self._uuid:
            return 0
        memory = await self._mesh.host.run_blocking(
            _read_memory, self._uuid, deadline_s=DRIVER_TIMEOUT_S
        )
        return 0 if memory is None else memory.total_bytes

    async def check_free(
        self, instance: Instance, name: str, peak_bytes: int, worker_processes: Mapping[int, str]
    ) -> None:
        """Check that the GPU has the minimum memory of an instance free.

        The minimum follows from its job's model, or from `peak_bytes` of its earlier process.
        `worker_processes`: names of this worker's processes by pid, for the error.

        Raises:
            GpuMemoryFull: Too little memory is free.
            GpuLost, GpuQueryFailed, NoDriver: The driver fails.
            DeadlineExceeded: The driver does not answer.
            StateUnavailable: Redis does not answer.
        """
        if not self._uuid:
            return
        # no process reports the context among its own bytes
        estimate = await self.estimate_bytes(instance)
        min_bytes = estimate.largest if instance.time_sliced else estimate.total
        needed_bytes = max(peak_bytes + self.context_bytes, min_bytes)
        memory = await self._mesh.host.run_blocking(
            _read_memory, self._uuid, deadline_s=DRIVER_TIMEOUT_S
        )
        if memory is not None and memory.free_bytes < needed_bytes:
            raise GpuMemoryFull(
                f"{name} needs {needed_bytes} bytes of GPU {self._uuid}, which has "
                f"{memory.free_bytes} free of "
                f"{memory.total_bytes}; {describe_holders(memory, worker_processes)}",
                where=self._mesh.name,
                fix="End processes that are not of this mesh; the worker retries",
            )

    async def estimate_bytes(self, instance: Instance) -> SliceBytes:
        """Estimate an instance's minimum bytes on each of its workers from its job's model.

        They include `context_bytes`. Return these alone if the job is no longer in Redis.
        """
        try:
            row = await jobs.read_job(self._mesh.state, instance.job)
        except NotFound:
            return SliceBytes(*[self.context_bytes] * 3)
        memory = derive_role_memory(row.document, "cuda" if self._uuid else "cpu")
        requirements = replace(derive_requirements(row.document), memory=memory)
        return estimate_slice_bytes(instance.role, instance.core, len(instance.ranks), requirements)


def describe_holders(memory: DeviceMemory, worker_processes: Mapping[int, str]) -> str:
    """Describe the largest processes on a GPU for an error message, with pid, name and bytes."""
    parts = []
    for process in memory.processes[:MAX_NAMED_HOLDERS]:
        name = worker_processes.get(process.pid) or process.name
        size = "an unknown number of" if process.used_bytes is None else str(process.used_bytes)
        parts.append(f"process {process.pid}{f' ({name})' if name else ''} uses {size} bytes")
    if (unlisted_count := len(memory.processes) - MAX_NAMED_HOLDERS) > 0:
        parts.append(f"{unlisted_count} more processes use memory")
    return ", ".join(parts) or "the driver reports no process that uses the memory"


def _read_memory(uuid: str) -> DeviceMemory | None:
    with nvml.open_driver() as driver:
        return driver.read_memory(uuid)
