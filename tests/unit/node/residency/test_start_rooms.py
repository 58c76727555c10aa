"""Processes that start or wake on an accelerator which other instances fill."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state.pool.workers.placement import build_parser
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    Role,
    Tier,
    TierBytes,
    WorkerRow,
)
from meshrl.services.node.instances.desired_roles import DesiredRole, list_desired_roles
from meshrl.services.node.instances.role_process import RoleProcess
from meshrl.services.node.residency.residency_manager import START_ROOM_TIMEOUT_S
from meshrl.services.node.residency.start_rooms import FIRST_RANK_TIMEOUT_S
from meshrl.services.node.worker import GangWorker
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.node.residency.virtual_roles import SIZES, KindRole, Tiers
from tests.unit.node.virtual_role import make_context

A = Instance("g0.0", "j", Role.ROLLOUT, time_sliced=True)
B = Instance("g0.1", "k", Role.ROLLOUT, time_sliced=True)
SIZE = sum(SIZES.values())
LOADS_S = 5.0  # from the start of a process until it is ready


class OneHost(SimulatedHost):
    pid = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.pid


class SharedWorker:
    """Worker of a gang whose role processes are simulated; each computes in time slices."""

    def __init__(self, clock: VirtualClock, random: Random, root: Path, accelerator: int) -> None:
        self.clock, self.random = clock, random
        self.state = open_simulated_state(clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.settings = MeshSettings("simulated", str(root), host="one")
        self.tiers = Tiers(TierBytes(accelerator))
        self.roles: dict[str, KindRole] = {}
        self.host = SimulatedHost(clock, random, {"meshrl.services.engine": self.run_engine})
        self.mesh = self.make_mesh("worker/w0", self.host)
        context = make_context(self.mesh, root)
        row = WorkerRow("w0", "one", "cpu:0", 0, budget=self.tiers.budgets)
        self.worker = GangWorker(self.mesh, row, context)
        for instance in (A, B):  # what an earlier process used
            context.budgets.record_usage(f"engine/{instance.id}", TierBytes(SIZE), can_move=True)
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
        seat = build_parser("").parse_args(arguments)
        name = f"engine/{seat.instance}"
        host = OneHost(self.clock, self.random)
        host.pid = max(pid for pid, child in self.host.children.items() if child.name == name)
        mesh = self.make_mesh(name, host)
        await self.clock.sleep(LOADS_S)
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


def run_worker(story: Callable[[SharedWorker], Awaitable[None]], accelerator: int) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        with tempfile.TemporaryDirectory() as root:
            shared = SharedWorker(clock, random, Path(root), accelerator)
            async with shared.worker.residency, shared.worker.instances:
                await shared.mesh.join(shared.worker)
                running = asyncio.create_task(shared.worker.slice_scheduler.run())
                await story(shared)
                running.cancel()
            await shared.mesh.leave()

    run_virtual(main, limit_s=3600.0)


def test_process_starts_when_others_have_left_its_room_and_all_compute() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        assert not any(one.startswith("offload") for one in shared.roles[A.id].calls)
        shared.set_desired(A, B)
        await shared.until_steps(B, 3)
        steps = shared.roles[A.id].steps
        await shared.until_steps(A, steps + 5)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160
        assert shared.process(B).restarts == 0

    run_worker(story, 160)


def test_process_that_fits_starts_without_a_time_slice() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        shared.set_desired(A, B)
        await shared.until_steps(B, 3)
        slices = shared.worker.slice_scheduler.granted_count
        assert slices <= shared.roles[A.id].steps + shared.roles[B.id].steps + 2
        assert not any(one.startswith("offload") for one in shared.roles[A.id].calls)

    run_worker(story, 200)


def test_killed_process_gets_its_room_back_before_it_restarts() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A, B)
        await shared.until_steps(A, 3, 120.0)
        await shared.until_steps(B, 3, 120.0)
        await shared.worker.instances.kill(B.id, 1, "a test")
        await shared.until("B restarted", lambda: shared.process(B).restarts == 1, 10.0)
        await shared.until_steps(B, 3, 120.0)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160

    run_worker(story, 160)


def test_process_sleeps_and_wakes_beside_another() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A, B)
        await shared.until_steps(A, 3, 120.0)
        await shared.until_steps(B, 3, 120.0)
        asleep = replace(B, tier=Tier.MEMORY, epoch=2)
        shared.set_desired(A, asleep)
        await shared.until("B sleeps", lambda: shared.process(B).tier == Tier.MEMORY, 60.0)
        assert not shared.roles[B.id].buffers[Tier.ACCELERATOR]
        await shared.until_steps(A, shared.roles[A.id].steps + 3)
        shared.set_desired(A, replace(asleep, tier=Tier.ACCELERATOR, epoch=3))
        await shared.until_steps(B, shared.roles[B.id].steps + 3)
        await shared.until_steps(A, shared.roles[A.id].steps + 3)
        assert shared.tiers.most[Tier.ACCELERATOR] <= 160

    run_worker(story, 160)


def test_process_that_never_fits_is_reported_with_the_figures() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        process = await shared.process_of(A)
        await shared.until("refused", lambda: process.phase == InstancePhase.FAILED, 10.0)
        assert "needs 100 bytes of the accelerator, of whose 90 bytes" in process.detail

    run_worker(story, 90)


def test_rank_that_starts_alone_acquires_a_time_slice_of_its_own() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 3)
        shared.worker.slice_scheduler.set_gang(Gang("g0", ("w0",), 1, (A, B)))
        core = replace(B, role=Role.TRAINING, core=True, ranks=(1, 0))  # its first rank runs
        role = DesiredRole("g0", core, 0, "worker/w0")
        residency = shared.worker.residency
        began = shared.clock.monotonic()
        while not residency.reserve(role, 61):
            await shared.clock.sleep(0.1)
        assert shared.clock.monotonic() - began >= FIRST_RANK_TIMEOUT_S
        assert shared.tiers.used[Tier.ACCELERATOR] <= 99
        # it may take the room again from a process that does not use it
        await shared.until_steps(A, shared.roles[A.id].steps + 1, START_ROOM_TIMEOUT_S + 10)

    run_worker(story, 160)
