"""What a worker makes of a process that cannot do what is wished: it waits for room that others are
about to give back, says what has failed, and tries a new wish at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from meshrl.common.api.calls.role import Resting, Settle, Settled
from meshrl.common.base.errors import RemoteFailure, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.seams import Seams
from meshrl.common.state.pool.workers.rows import Budget, Doing, Resident, Role, Tier
from meshrl.common.state.pool.workers.seat import parser
from meshrl.services.node.residents.process import TRY_AGAIN_S, UNSETTLED_S, WELL_S
from meshrl.services.node.residents.residents import OLD_LOGS, Residents, Tenancy
from meshrl.sim.loop import VirtualClock, run_virtual
from meshrl.sim.network import MemoryNetwork, MemoryTransport
from meshrl.sim.redis.state import simulated_state
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.node.standing import around, wish

ENGINE = Resident("g0.0", "j", Role.ROLLOUT)
HELPER = Resident("g0.1", "j", Role.TRAINING)
BYTES = 1000  # of each on the accelerator
DRAINS_S = 3.0


class Process(Actor):
    """Takes all of the accelerator, drains slowly, and moves unless something is wrong."""

    interface = Resting

    def __init__(self) -> None:
        self.wrong: dict[str, Exception] = {}  # by tier
        self.asked: list[str] = []

    @call(Resting.drain)
    async def drain(self, reason: str) -> None:
        await asyncio.sleep(DRAINS_S)

    @call(Resting.settle)
    def settle(self, m: Settle) -> Settled:
        self.asked.append(m.tier)
        if m.tier in self.wrong:
            raise self.wrong[m.tier]
        return Settled(*(BYTES if m.tier == tier else 0 for tier in list(Tier)[:3]))


class OneHost(SimulatedHost):
    pid = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.pid


class World:
    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        self.clock, self.random = clock, random
        self._names: list[str] = []  # of meshes so far
        self.state = simulated_state(clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.settings = MeshSettings("simulated", str(root), host="one")
        self.process = Process()
        self.ends_after_s = 1e9
        programs = {f"meshrl.services.{kind}": self.program(kind) for kind in ("engine", "trainer")}
        self.host = SimulatedHost(clock, random, programs)
        self.worker = self.mesh("worker/w0", self.host)
        about = around(self.worker, root)
        about.budgets.limits = Budget(accelerator=BYTES)
        self.residents = Residents(about, lambda: None, lambda resident: None)

    def mesh(self, name: str, host: SimulatedHost) -> Mesh:
        transport = MemoryTransport(self.network, f"mem://{name}/{len(self._names)}")
        self._names.append(name)
        return Mesh(
            name,
            name.partition("/")[0],
            Seams(
                state=self.state,
                transport=transport,
                clock=self.clock,
                random=self.random,
                host=host,
            ),
            settings=self.settings,
        )

    def program(self, kind: str) -> Callable[[list[str], SimulatedChannel], Awaitable[None]]:
        async def run(arguments: list[str], channel: SimulatedChannel) -> None:
            seat = parser("").parse_args(arguments)
            name = f"{'engine' if kind == 'engine' else 'hybrid'}/{seat.resident}"
            host = OneHost(self.clock, self.random)
            host.pid = max(pid for pid, c in self.host.children.items() if c.name == name)
            mesh = self.mesh(name, host)
            await mesh.join(
                self.process, stats=lambda: {"generation": seat.generation, "ready": True}
            )
            try:
                await self.clock.sleep(self.ends_after_s)
            finally:
                await mesh.leave()

        return run

    def want(self, *residents: Resident) -> None:
        self.residents.want({w.name: w for w in map(wish, residents)})

    def tenancy(self, resident: Resident) -> Tenancy:
        [found] = [t for t in self.residents.tenancies if t.name == wish(resident).name]
        return found

    async def until(self, resident: Resident, doing: Doing, within_s: float) -> list[Doing]:
        """What its process did until then."""
        seen: list[Doing] = []
        until = self.clock.monotonic() + within_s
        while not seen or seen[-1] != doing:
            assert self.clock.monotonic() < until, (seen, self.detail(resident))
            await self.clock.sleep(0.05)
            process = self.tenancy(resident).process
            seen += [process.doing] if process is not None else []
        return seen

    def detail(self, resident: Resident) -> str:
        process = self.tenancy(resident).process
        return process.detail if process is not None else ""


def in_world(tmp_path: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random, tmp_path)
        await world.worker.join(None)
        async with world.residents:
            await story(world)
        await world.worker.leave()

    run_virtual(main, limit_s=3600.0)


def test_who_arrives_waits_for_who_leaves_and_has_not_failed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.want(ENGINE)
        await world.until(ENGINE, Doing.READY, 30.0)
        world.want(HELPER)
        await world.clock.sleep(DRAINS_S / 2)
        assert "others have 1000" in world.detail(HELPER)
        assert Doing.FAILED not in await world.until(HELPER, Doing.READY, 30.0)

    in_world(tmp_path, story)


def test_who_arrives_where_nobody_leaves_has_failed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.want(ENGINE)
        await world.until(ENGINE, Doing.READY, 30.0)
        world.want(ENGINE, HELPER)
        await world.until(HELPER, Doing.FAILED, 1.0)

    in_world(tmp_path, story)


def test_a_new_wish_is_tried_at_once_and_is_not_failed_for_the_last_ones_sake(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        world.want(ENGINE)
        await world.until(ENGINE, Doing.READY, 30.0)
        world.process.wrong[Tier.DISK] = StorageFull("no room", where="/kept")
        world.want(replace(ENGINE, tier=Tier.DISK, epoch=2))
        await world.until(ENGINE, Doing.FAILED, 1.0)
        assert "no room" in world.detail(ENGINE)
        world.want(replace(ENGINE, tier=Tier.MEMORY, epoch=3))
        process = world.tenancy(ENGINE).process
        assert process is not None and process.doing == Doing.MOVING
        assert Doing.FAILED not in await world.until(ENGINE, Doing.READY, 1.0)
        assert process.tier == Tier.MEMORY

    in_world(tmp_path, story)


def test_an_error_that_stays_is_told_as_a_failure_and_one_that_passes_is_not(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        world.want(ENGINE)
        await world.until(ENGINE, Doing.READY, 30.0)
        world.process.wrong[Tier.DISK] = RemoteFailure("OSError: Input/output error")
        world.want(replace(ENGINE, tier=Tier.DISK, epoch=2))
        await world.until(ENGINE, Doing.MOVING, 1.0)
        await world.clock.sleep(UNSETTLED_S / 2)
        assert world.tenancy(ENGINE).process.doing == Doing.MOVING  # type: ignore[union-attr]
        await world.until(ENGINE, Doing.FAILED, UNSETTLED_S)
        assert "Input/output error" in world.detail(ENGINE)
        asked = len(world.process.asked)
        await world.clock.sleep(TRY_AGAIN_S / 2)
        assert len(world.process.asked) == asked
        del world.process.wrong[Tier.DISK]
        await world.until(ENGINE, Doing.READY, TRY_AGAIN_S)

    in_world(tmp_path, story)


def test_logs_of_residents_that_are_gone_do_not_grow_for_ever(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for number in range(OLD_LOGS + 2):
            one = replace(ENGINE, id=f"g{number}.0")
            world.want(one)
            world.residents.around.log(f"engine/{one.id}").write_text("said")
            await world.clock.sleep(0.2)
            world.want()
            await world.clock.sleep(12.0)

    in_world(tmp_path, story)
    assert len(list(tmp_path.glob("*.log"))) == OLD_LOGS
    assert not (tmp_path / "engine-g1.0.log").exists()


def test_a_process_that_has_ended_well_is_soon_there_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.ends_after_s = 10.0
        world.want(ENGINE)
        await world.until(ENGINE, Doing.READY, 5.0)
        again = await world.until(ENGINE, Doing.STARTING, 11.0)
        world.ends_after_s = 1e9
        again += await world.until(ENGINE, Doing.READY, WELL_S + 5.0)
        assert Doing.FAILED not in again

    in_world(tmp_path, story)
