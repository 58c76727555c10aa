"""A role process as a worker of a virtual host has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Budget, Resident, Role
from meshrl.services.node.residents.budgets import Budgets
from meshrl.services.node.residents.process import Around, RoleProcess
from meshrl.services.node.residents.roles import RoleWish
from meshrl.services.node.residents.room import GpuRoom
from meshrl.services.node.residents.segments import Segments

ENGINE = Resident("g0.0", "calc", Role.ROLLOUT, generation=3)
CORE = Resident("g0.1", "j", Role.TRAINING, core=True, generation=3)
PROGRAMS = {
    Role.ROLLOUT: ["python", "-m", "meshrl.services.engine"],
    Role.TRAINING: ["python", "-m", "meshrl.services.trainer"],
}


def around(mesh: Mesh, root: Path) -> Around:
    found = {str(role): argv for role, argv in PROGRAMS.items()}
    budgets = Budgets(Budget(), mesh.host, root)
    return Around(mesh, "w0", found, root, budgets, Segments(lambda: 0), GpuRoom(mesh))


def wish(resident: Resident) -> RoleWish:
    return RoleWish("g0", resident, resident.ranks[0], "worker/w0")


def role_process(
    mesh: Mesh, root: Path, resident: Resident, changed: Callable[[], None] = lambda: None
) -> RoleProcess:
    found: list[RoleProcess] = []
    leases = LeaseWatch(
        mesh.state,
        mesh.clock,
        mesh.settings.host,
        lambda: [child for one in found for child in one.supervisor.children.values()],
    )
    found.append(RoleProcess(around(mesh, root), wish(resident), leases, changed))
    return found[0]


async def looking(process: RoleProcess, for_s: float) -> None:
    """What a worker does for so long, until the job would have ended its role."""
    for _ in range(int(for_s)):
        await asyncio.sleep(1.0)
        await process.look()
