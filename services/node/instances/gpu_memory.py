"""Whether a worker's GPU has the memory that a resident is about to take: another program may have
it. Asked before a process starts, and before one that sleeps wakes.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.common.base.errors import NotFound
from meshrl.common.hardware.gpus import nvml
from meshrl.common.hardware.gpus.devices import DeviceMemory
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.pool.demand.requirements import derive_requirements
from meshrl.common.state.pool.scheduling.feasibility import estimate_accelerator_bytes
from meshrl.common.state.pool.workers.rows import Instance
from meshrl.services.node.instances.budgets import OverBudget

CUDA_CONTEXT_BYTES = 512 << 20  # what a process takes for CUDA itself, before its first tensor
DRIVER_TIMEOUT_S = 30.0  # the driver answers at once, or hangs
MAX_NAMED_HOLDERS = 4  # holders of memory that are told, the largest first


class GpuMemoryFull(OverBudget):
    """A GPU has less memory free than a resident needs."""

    code = "gpu_full"


class GpuMemoryGuard:
    """Of the device with this UUID; without one there is always room."""

    def __init__(self, mesh: Mesh, uuid: str = "") -> None:
        self._mesh, self._uuid = mesh, uuid

    async def check_free(
        self, instance: Instance, name: str, peak_bytes: int, worker_processes: Mapping[int, str]
    ) -> None:
        """GpuFull unless as much is free as a resident takes at least: by its job's model, or by
        what it has had `before`. GpuLost or GpuTrouble where the driver does not tell. `ours` are
        processes of this worker, by pid.
        """
        if not self._uuid:
            return
        needed = max(peak_bytes, await self.estimate_min_bytes(instance)) + CUDA_CONTEXT_BYTES
        memory = await self._mesh.host.run_blocking(
            _read_memory, self._uuid, deadline_s=DRIVER_TIMEOUT_S
        )
        if memory is not None and memory.free_bytes < needed:
            raise GpuMemoryFull(
                f"{name} needs {needed} bytes of GPU {self._uuid}, which has "
                f"{memory.free_bytes} free of "
                f"{memory.total_bytes}; {describe_holders(memory, worker_processes)}",
                where=self._mesh.name,
                fix="End what is not of this mesh; it is tried again",
            )

    async def estimate_min_bytes(self, instance: Instance) -> int:
        """The bytes that a resident takes of each of its workers at least, by the model's shape; 0
        where it is not known.
        """
        try:
            row = await jobs.read_job(self._mesh.state, instance.job)
        except NotFound:
            return 0
        need = derive_requirements(row.document)
        return estimate_accelerator_bytes(instance.role, instance.core, len(instance.ranks), need)


def describe_holders(memory: DeviceMemory, worker_processes: Mapping[int, str]) -> str:
    parts = []
    for one in memory.processes[:MAX_NAMED_HOLDERS]:
        who = worker_processes.get(one.pid) or one.name
        size = "an untold number of" if one.used_bytes is None else str(one.used_bytes)
        parts.append(f"process {one.pid}{f' ({who})' if who else ''} has {size} bytes")
    if (more := len(memory.processes) - MAX_NAMED_HOLDERS) > 0:
        parts.append(f"{more} more processes have some")
    return ", ".join(parts) or "the driver names no process that has it"


def _read_memory(uuid: str) -> DeviceMemory | None:
    with nvml.open_driver() as opened:
        return opened.read_memory(uuid)
