"""Worker with simulated role processes on a virtual clock, which compute in time slices."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    Role,
    Tier,
    TierBytes,
    WorkerRow,
)
from meshrl.common.state.redis.client import StateClient
from meshrl.services.node.instances.desired_roles import list_desired_roles
from meshrl.services.node.instances.role_process import RoleProcess
from meshrl.services.node.instances.segments import MemorySegments
from meshrl.services.node.worker import GangWorker
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_state_on
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.node.residency.virtual_roles import SIZES, KindRole, Tiers
from tests.unit.node.virtual_role import make_context

W = TypeVar("W", bound="SharedWorker")
A = Instance("g0.0", "j", Role.ROLLOUT, time_sliced=True)
B = Instance("g0.1", "k", Role.ROLLOUT, time_sliced=True)
LOADS_S = 5.0  # from the start of a process until it is ready


class OneHost(SimulatedHost):
    pid = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.pid


class SharedWorker:
    """Worker of a gang whose role processes are simulated; each computes in time slices."""

    size_bytes = sum(SIZES.values())  # of an instance

    def __init__(self, clock: VirtualClock, random: Random, root: Path, budgets: TierBytes) -> None:
        self.clock, self.random = clock, random
        self.redis = SimulatedRedisServer(clock)
        self.state = open_state_on(self.redis, StateClient, clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.settings = MeshSettings("simulated", str(root), host="one")
        self.tiers = Tiers(budgets)
        self.roles: dict[str, KindRole] = {}
        self.meshes: dict[str, Mesh] = {}  # of the latest processes, by instance
        self.host = SimulatedHost(clock, random, {"meshrl.services.engine": self.run_engine})
        self.mesh = self.make_mesh("worker/w0", self.host)
        self.free_bytes = 1 << 40  # of host memory
        self.segments = MemorySegments(lambda: self.free_bytes)
        context = replace(make_context(self.mesh, root), segments=self.segments)
        row = WorkerRow("w0", "one", "cpu:0", 0, budget=self.tiers.budgets)
        self.worker = GangWorker(self.mesh, row, context)
        for instance in (A, B):  # what an earlier process used
            context.budgets.record_usage(
                f"engine/{instance.id}", TierBytes(self.size_bytes), can_move=True
            )
            context.budgets.record_exit(f"engine/{instance.id}")
        context.budgets.limits = self.tiers.budgets

    def make_mesh(self, name: str, host: SimulatedHost) -> Mesh:
        address = f"mem://{name}/{self.random.random()}"
        dependencies = MeshDependencies(
            state=self.state,
            transport=MemoryTransport(self.network, address),
            clock=self.clock,
            random=Random(self.random.randrange(1 << 30)),
            host=host,
        )
        return Mesh(name, name.partition("/")[0], dependencies, settings=self.settings)

    async def run_engine(self, arguments: list[str], channel: SimulatedChannel) -> None:
        seat = Placement.from_args(build_parser("").parse_args(arguments))
        name = f"engine/{seat.instance}"
        host = OneHost(self.clock, self.random)
        host.pid = max(pid for pid, child in self.host.children.items() if child.name == name)
        mesh = self.meshes[seat.instance] = self.make_mesh(name, host)
        await self.load(mesh, seat)
        await self.serve(mesh, seat)

    async def load(self, mesh: Mesh, seat: Placement) -> None:
        """Take the time of a start."""
        await self.clock.sleep(LOADS_S)

    async def serve(self, mesh: Mesh, seat: Placement) -> None:
        """Compute in time slices until the process ends."""
        if (earlier := self.roles.get(seat.instance)) is not None:
            earlier.delete_copies()
        role = self.roles[seat.instance] = KindRole(self.clock, self.tiers, SIZES, Tier.ACCELERATOR)
        await mesh.join(role, stats=lambda: {"generation": seat.generation, "ready": True})
        slices = SliceClient(
            mesh, seat.slice_scheduler, seat.instance, seat.generation, enabled=True
        )
        try:
            while True:
                while role.is_asleep:
                    await self.clock.sleep(0.1)
                async with slices.time_slice("generate"):
                    await role.compute(list(SIZES), 0.5)
                await self.clock.sleep(0.1)
        finally:
            role.die()
            await mesh.leave()

    def set_desired(self, *instances: Instance) -> None:
        gang = Gang("g0", ("w0",), 1, instances)
        self.worker.instances.set_desired(list_desired_roles(gang, "w0"))
        self.worker.slice_scheduler.set_gang(gang)

    async def process_of(self, instance: Instance) -> RoleProcess:
        """Return the process of an instance once its slot has made it."""
        await self.until("a process", lambda: bool(self._find(instance)), 5.0)
        return self._find(instance)[0]

    def process(self, instance: Instance) -> RoleProcess:
        return self._find(instance)[0]

    def _find(self, instance: Instance) -> list[RoleProcess]:
        return [
            one
            for one in self.worker.instances.processes
            if isinstance(one, RoleProcess) and one.process_key[0] == instance.id
        ]

    async def until(self, what: str, holds: Callable[[], bool], within_s: float) -> None:
        deadline = self.clock.monotonic() + within_s
        while not holds():
            assert self.clock.monotonic() < deadline, f"not {what}"
            await self.clock.sleep(0.1)

    async def until_steps(self, instance: Instance, count: int, within_s: float = 60.0) -> None:
        await self.until(
            f"{count} steps of {instance.id}",
            lambda: instance.id in self.roles and self.roles[instance.id].steps >= count,
            within_s,
        )


def run_worker(story: Callable[[W], Awaitable[None]], budgets: TierBytes, kind: type[W]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        with tempfile.TemporaryDirectory() as root:
            shared = kind(clock, random, Path(root), budgets)
            async with shared.segments, shared.worker.residency, shared.worker.instances:
                await shared.mesh.join(shared.worker)
                running = asyncio.create_task(shared.worker.slice_scheduler.run())
                await story(shared)
                running.cancel()
            await shared.mesh.leave()

    run_virtual(main, limit_s=3600.0)
