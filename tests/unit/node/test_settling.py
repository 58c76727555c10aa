"""Role processes on their way to what is wished: loading, waiting for room, taking too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.role import RoleControl, SetTier, TierUsage
from meshrl.common.base.errors import RemoteFailure, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state import jobs, leader, registry
from meshrl.common.state.pool.scheduling.decisions import Rationale, SetBlockReason
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.placement import build_parser
from meshrl.common.state.pool.workers.rows import Instance, InstancePhase, Role, Tier, TierBytes
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.services.node.instances.role_process import (
    RESTART_AFTER_SUCCESS_S,
    SET_TIER_ERROR_TOLERANCE_S,
    TRY_AGAIN_S,
)
from meshrl.services.node.instances.startup import NO_PROGRESS_TIMEOUT_S
from meshrl.services.node.instances.worker_instances import (
    MAX_OLD_LOGS,
    ProcessSlot,
    WorkerInstances,
)
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.meshes import alone
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.stories import story_on
from tests.unit.node.standing import CORE, around, role_process, wish

ENGINE = Instance("g0.0", "j", Role.ROLLOUT)
HELPER = Instance("g0.1", "j", Role.TRAINING)
BYTES = 1000  # of each on the accelerator
DRAINS_S = 3.0


class Process(Actor):
    """Takes all of the accelerator, drains slowly, and moves unless something is wrong."""

    interface = RoleControl

    def __init__(self) -> None:
        self.wrong: dict[str, Exception] = {}  # by tier
        self.asked: list[str] = []

    @call(RoleControl.drain)
    async def drain(self, reason: str) -> None:
        await asyncio.sleep(DRAINS_S)

    @call(RoleControl.set_tier)
    def settle(self, m: SetTier) -> TierUsage:
        self.asked.append(m.tier)
        if m.tier in self.wrong:
            raise self.wrong[m.tier]
        return TierUsage(*(BYTES if m.tier == tier else 0 for tier in list(Tier)[:3]))


class OneHost(SimulatedHost):
    pid = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.pid


class World:
    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        self.clock, self.random = clock, random
        self._names: list[str] = []  # of meshes so far
        self.state = open_simulated_state(clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.settings = MeshSettings("simulated", str(root), host="one")
        self.process = Process()
        self.ends_after_s = 1e9
        programs = {f"meshrl.services.{kind}": self.program(kind) for kind in ("engine", "trainer")}
        self.host = SimulatedHost(clock, random, programs)
        self.worker = self.mesh("worker/w0", self.host)
        about = around(self.worker, root)
        about.budgets.limits = TierBytes(accelerator=BYTES)
        self.residents = WorkerInstances(about, lambda: None, lambda resident: None)

    def mesh(self, name: str, host: SimulatedHost) -> Mesh:
        transport = MemoryTransport(self.network, f"mem://{name}/{len(self._names)}")
        self._names.append(name)
        return Mesh(
            name,
            name.partition("/")[0],
            MeshDependencies(
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
            seat = build_parser("").parse_args(arguments)
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

    def want(self, *residents: Instance) -> None:
        self.residents.set_desired({w.name: w for w in map(wish, residents)})

    def tenancy(self, resident: Instance) -> ProcessSlot:
        [found] = [t for t in self.residents.slots if t.name == wish(resident).name]
        return found

    async def until(
        self, resident: Instance, doing: InstancePhase, within_s: float
    ) -> list[InstancePhase]:
        """What its process did until then."""
        seen: list[InstancePhase] = []
        until = self.clock.monotonic() + within_s
        while not seen or seen[-1] != doing:
            assert self.clock.monotonic() < until, (seen, self.detail(resident))
            await self.clock.sleep(0.05)
            process = self.tenancy(resident).process
            seen += [process.phase] if process is not None else []
        return seen

    def detail(self, resident: Instance) -> str:
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


@story_on(in_world, "tmp_path")
async def test_who_arrives_waits_for_who_leaves_and_has_not_failed(world: World) -> None:
    world.want(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.want(HELPER)
    await world.clock.sleep(DRAINS_S / 2)
    assert "others have 1000" in world.detail(HELPER)
    assert InstancePhase.FAILED not in await world.until(HELPER, InstancePhase.READY, 30.0)


@story_on(in_world, "tmp_path")
async def test_who_arrives_where_nobody_leaves_has_failed(world: World) -> None:
    world.want(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.want(ENGINE, HELPER)
    await world.until(HELPER, InstancePhase.FAILED, 1.0)


@story_on(in_world, "tmp_path")
async def test_a_new_wish_is_tried_at_once_and_is_not_failed_for_the_last_ones_sake(
    world: World,
) -> None:
    world.want(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.process.wrong[Tier.DISK] = StorageFull("no room", where="/kept")
    world.want(replace(ENGINE, tier=Tier.DISK, epoch=2))
    await world.until(ENGINE, InstancePhase.FAILED, 1.0)
    assert "no room" in world.detail(ENGINE)
    world.want(replace(ENGINE, tier=Tier.MEMORY, epoch=3))
    process = world.tenancy(ENGINE).process
    assert process is not None and process.phase == InstancePhase.MOVING
    assert InstancePhase.FAILED not in await world.until(ENGINE, InstancePhase.READY, 1.0)
    assert process.tier == Tier.MEMORY


@story_on(in_world, "tmp_path")
async def test_an_error_that_stays_is_told_as_a_failure_and_one_that_passes_is_not(
    world: World,
) -> None:
    world.want(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.process.wrong[Tier.DISK] = RemoteFailure("OSError: Input/output error")
    world.want(replace(ENGINE, tier=Tier.DISK, epoch=2))
    await world.until(ENGINE, InstancePhase.MOVING, 1.0)
    await world.clock.sleep(SET_TIER_ERROR_TOLERANCE_S / 2)
    assert world.tenancy(ENGINE).process.phase == InstancePhase.MOVING  # type: ignore[union-attr]
    await world.until(ENGINE, InstancePhase.FAILED, SET_TIER_ERROR_TOLERANCE_S)
    assert "Input/output error" in world.detail(ENGINE)
    asked = len(world.process.asked)
    await world.clock.sleep(TRY_AGAIN_S / 2)
    assert len(world.process.asked) == asked
    del world.process.wrong[Tier.DISK]
    await world.until(ENGINE, InstancePhase.READY, TRY_AGAIN_S)


def test_logs_of_residents_that_are_gone_do_not_grow_for_ever(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for number in range(MAX_OLD_LOGS + 2):
            one = replace(ENGINE, id=f"g{number}.0")
            world.want(one)
            world.residents.context.log_path(f"engine/{one.id}").write_text("said")
            await world.clock.sleep(0.2)
            world.want()
            await world.clock.sleep(12.0)

    in_world(tmp_path, story)
    assert len(list(tmp_path.glob("*.log"))) == MAX_OLD_LOGS
    assert not (tmp_path / "engine-g1.0.log").exists()


@story_on(in_world, "tmp_path")
async def test_a_process_that_has_ended_well_is_soon_there_again(world: World) -> None:
    world.ends_after_s = 10.0
    world.want(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 5.0)
    again = await world.until(ENGINE, InstancePhase.STARTING, 11.0)
    world.ends_after_s = 1e9
    again += await world.until(ENGINE, InstancePhase.READY, RESTART_AFTER_SUCCESS_S + 5.0)
    assert InstancePhase.FAILED not in again


NAME, HOST, TRAINER = "trainer/j", "here", "meshrl.services.trainer"


@dataclass
class LoadingWorld:
    """A worker's mesh, its role process, and what that one publishes."""

    clock: VirtualClock
    random: Random

    def __post_init__(self) -> None:
        async def program(arguments: list[str], channel: Any) -> None:
            self.starts += 1
            while True:
                await self.clock.sleep(1e9)

        self.starts = 0
        host = SimulatedHost(self.clock, self.random.child("host"), {TRAINER: program})
        settings = MeshSettings(redis_url="simulated", run_root="", host=HOST)
        mesh = alone("worker/w0", self.clock, self.random, host, settings=settings)
        self.state = mesh.state
        self.news = asyncio.Event()
        self.role = role_process(mesh, Path(), CORE, self.news.set)

    async def look_for(self, seconds: float, publish: Callable[[float], dict[str, Any]]) -> None:
        """The worker looks each ten seconds at what its process publishes by then."""
        entry = registry.RegistryEntry(
            NAME, "trainer", host=HOST, pid=self.role.pid, incarnation="a"
        )
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until and self.starts == 1:
            about = {"generation": CORE.generation, "ready": False}
            entry.stats = about | publish(self.clock.monotonic())
            await registry.register(self.state, entry, 60_000)
            await self.role.poll()
            await self.clock.sleep(10.0)


def while_loading(story: Callable[[LoadingWorld], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = LoadingWorld(clock, random)
        await world.role.start()
        await clock.sleep(1.0)
        await story(world)

    run_virtual(main, limit_s=100_000.0)


@story_on(while_loading)
async def test_one_that_replays_for_an_hour_is_let_do_so(world: LoadingWorld) -> None:
    await world.look_for(3600.0, lambda now: {"progress": [int(now) // 250, 0.0]})
    assert world.starts == 1 and not world.role.is_ready
    await world.look_for(20.0, lambda now: {"ready": True, "progress": [99, 0.0]})
    assert world.role.is_ready


@story_on(while_loading)
async def test_one_that_gets_no_further_is_killed_and_started_again(world: LoadingWorld) -> None:
    await world.look_for(NO_PROGRESS_TIMEOUT_S - 20.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 1
    await world.look_for(60.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 2 and world.role.restarts == 1


@story_on(while_loading)
async def test_one_that_tells_nothing_is_killed_after_a_while(world: LoadingWorld) -> None:
    await world.look_for(NO_PROGRESS_TIMEOUT_S - 20.0, lambda now: {})
    assert world.starts == 1
    await world.look_for(60.0, lambda now: {})
    assert world.starts == 2


@story_on(while_loading)
async def test_nobody_is_late_while_its_job_is_paused(world: LoadingWorld) -> None:
    document = {
        "algorithm": {"groups_per_step": 1, "group_size": 1, "max_staleness": 1},
        "budget": {"steps": 3},
    }
    await jobs.submit(world.state, "j", document, "", "submit")
    led = await leader.campaign(world.state, PLANNER_ELECTION, "test", 1_000_000)
    why = Rationale("share", "j")
    await pool.write_decisions(
        world.state, led, "pause", [SetBlockReason("j", "paused: another one", why)], None
    )
    await world.look_for(3 * NO_PROGRESS_TIMEOUT_S, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 1
    await pool.write_decisions(world.state, led, "go on", [SetBlockReason("j", "", why)], None)
    await world.look_for(NO_PROGRESS_TIMEOUT_S - 50.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 1
    await world.look_for(90.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 2


@story_on(while_loading)
async def test_its_end_is_news_to_the_worker_at_once(world: LoadingWorld) -> None:
    await world.look_for(5.0, lambda now: {"ready": True})
    assert world.role.is_ready
    world.news.clear()
    [child] = world.role.supervisor.children.values()
    child.kill()
    async with world.clock.timeout(0.1, "the news"):
        await world.news.wait()
    assert not world.role.is_ready and world.role.phase == InstancePhase.STARTING
