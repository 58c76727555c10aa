"""Whether a worker's GPU has the memory that a resident is about to take: another program may have
it. Asked before a process starts, and before one that sleeps wakes.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.common.base.errors import NotFound
from meshrl.common.hardware.gpus import driver
from meshrl.common.hardware.gpus.devices import Memory
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.pool.demand.needs import need_of
from meshrl.common.state.pool.placing.fitting import takes
from meshrl.common.state.pool.workers.rows import Resident
from meshrl.services.node.residents.budgets import OverBudget

CONTEXT = 512 << 20  # what a process takes for CUDA itself, before its first tensor
ANSWER_S = 30.0  # the driver answers at once, or hangs
NAMED = 4  # holders of memory that are told, the largest first


class GpuFull(OverBudget):
    """A GPU has less memory free than a resident needs."""

    code = "gpu_full"


class GpuRoom:
    """Of the device with this UUID; without one there is always room."""

    def __init__(self, mesh: Mesh, uuid: str = "") -> None:
        self._mesh, self._uuid = mesh, uuid

    async def check(
        self, resident: Resident, name: str, before: int, ours: Mapping[int, str]
    ) -> None:
        """GpuFull unless as much is free as a resident takes at least: by its job's model, or by
        what it has had `before`. GpuLost or GpuTrouble where the driver does not tell. `ours` are
        processes of this worker, by pid.
        """
        if not self._uuid:
            return
        needed = max(before, await self.least(resident)) + CONTEXT
        memory = await self._mesh.host.run_blocking(_memory, self._uuid, deadline_s=ANSWER_S)
        if memory is not None and memory.free < needed:
            raise GpuFull(
                f"{name} needs {needed} bytes of GPU {self._uuid}, which has {memory.free} free of "
                f"{memory.total}; {holders(memory, ours)}",
                where=self._mesh.name,
                fix="End what is not of this mesh; it is tried again",
            )

    async def least(self, resident: Resident) -> int:
        """The bytes that a resident takes of each of its workers at least, by the model's shape; 0
        where it is not known.
        """
        try:
            row = await jobs.job(self._mesh.state, resident.job)
        except NotFound:
            return 0
        need = need_of(row.document)
        return takes(resident.role, resident.core, len(resident.ranks), need)


def holders(memory: Memory, ours: Mapping[int, str]) -> str:
    parts = []
    for one in memory.holders[:NAMED]:
        who = ours.get(one.pid) or one.name
        size = "an untold number of" if one.bytes is None else str(one.bytes)
        parts.append(f"process {one.pid}{f' ({who})' if who else ''} has {size} bytes")
    if (more := len(memory.holders) - NAMED) > 0:
        parts.append(f"{more} more processes have some")
    return ", ".join(parts) or "the driver names no process that has it"


def _memory(uuid: str) -> Memory | None:
    with driver.opened() as opened:
        return opened.memory(uuid)
