"""Role process of a worker on a virtual host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Instance, Role, TierBytes
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.instances.gpu_memory import GpuMemoryGuard
from meshrl.services.node.instances.role_process import RoleProcess, WorkerContext
from meshrl.services.node.instances.segments import MemorySegments

ENGINE = Instance("g0.0", "calc", Role.ROLLOUT, generation=3)
CORE = Instance("g0.1", "j", Role.TRAINING, core=True, generation=3)
PROGRAMS = {
    Role.ROLLOUT: ["python", "-m", "meshrl.services.engine"],
    Role.TRAINING: ["python", "-m", "meshrl.services.trainer"],
}


def make_context(mesh: Mesh, root: Path) -> WorkerContext:
    found = {str(role): argv for role, argv in PROGRAMS.items()}
    budgets = Budgets(TierBytes(), mesh.host, root)
    return WorkerContext(
        mesh, "w0", found, root, budgets, MemorySegments(lambda: 0), GpuMemoryGuard(mesh)
    )


def make_desired_role(instance: Instance) -> DesiredRole:
    return DesiredRole("g0", instance, instance.ranks[0], "worker/w0")


def role_process(
    mesh: Mesh, root: Path, instance: Instance, changed: Callable[[], None] = lambda: None
) -> RoleProcess:
    found: list[RoleProcess] = []
    leases = LeaseWatch(
        mesh.state,
        mesh.clock,
        mesh.settings.host,
        lambda: [child for one in found for child in one.supervisor.children.values()],
    )
    found.append(
        RoleProcess(make_context(mesh, root), make_desired_role(instance), leases, changed)
    )
    return found[0]


async def poll_every_second(process: RoleProcess, for_s: float) -> None:
    """Poll the role process once a second, as its worker does."""
    for _ in range(int(for_s)):
        await asyncio.sleep(1.0)
        await process.poll()
