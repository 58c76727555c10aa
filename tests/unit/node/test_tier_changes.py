"""Role processes that move to their desired state: loading, waiting for memory, timing out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.role import RoleControl, SetTier, TierUsage
from meshrl.common.base.errors import RemoteFailure, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state import jobs, leader, registry
from meshrl.common.state.pool.scheduling.decisions import Rationale, SetBlockReason
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.placement import build_parser
from meshrl.common.state.pool.workers.rows import Instance, InstancePhase, Role, Tier, TierBytes
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.services.node.instances.accelerator_room import UncountedRoom
from meshrl.services.node.instances.role_process import (
    RESTART_AFTER_SUCCESS_S,
    SET_TIER_ERROR_TOLERANCE_S,
    TRY_AGAIN_S,
    WAITING_FOR_ROOM,
    WAITING_FOR_SLICES,
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
from tests.unit.node.virtual_role import CORE, make_context, make_desired_role, role_process

ENGINE = Instance("g0.0", "j", Role.ROLLOUT)
HYBRID = Instance("g0.1", "j", Role.TRAINING)
BYTES = 1000  # size of each process on the accelerator
DRAINS_S = 3.0


class Process(KindCallsMixin):
    """Role process that fills the accelerator, drains slowly and moves unless `wrong` has an
    error.
    """

    interface = RoleControl

    def __init__(self, mesh: Mesh) -> None:
        self.kinds = KindController(mesh, {}, partial(mesh.host.run_blocking, deadline_s=60.0))
        self.wrong: dict[str, Exception] = {}  # by tier
        self.requests: list[str] = []
        self.slicing: list[bool] = []
        self.has_ended_piece = asyncio.Event()
        self.has_ended_piece.set()

    @call(RoleControl.drain)
    async def drain(self, reason: str) -> None:
        await asyncio.sleep(DRAINS_S)

    @call(RoleControl.set_tier)
    async def settle(self, m: SetTier) -> TierUsage:
        self.requests.append(m.tier)
        self.slicing.append(m.time_sliced)
        await self.has_ended_piece.wait()
        if m.tier in self.wrong:
            raise self.wrong[m.tier]
        return TierUsage(*(BYTES if m.tier == tier else 0 for tier in list(Tier)[:3]))


class CountedRoom(UncountedRoom):
    is_limited = True


class OneHost(SimulatedHost):
    pid = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.pid


class World:
    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        self.clock, self.random = clock, random
        self._names: list[str] = []  # names of the meshes so far
        self.state = open_simulated_state(clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.settings = MeshSettings("simulated", str(root), host="one")
        self.process = Process(self.mesh("role/moved", SimulatedHost(clock, random)))
        self.ends_after_s = 1e9
        self.starts_slowly: set[str] = set()  # names that are not ready yet
        programs = {f"meshrl.services.{kind}": self.program(kind) for kind in ("engine", "trainer")}
        self.host = SimulatedHost(clock, random, programs)
        self.worker = self.mesh("worker/w0", self.host)
        about = make_context(self.worker, root)
        about.budgets.limits = TierBytes(accelerator=BYTES)
        self.starts: list[tuple[str, bool]] = []  # name, time-sliced
        about = replace(about, room=CountedRoom())
        self.instances = WorkerInstances(about, lambda: None, lambda instance: None)

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
            name = f"{'engine' if kind == 'engine' else 'hybrid'}/{seat.instance}"
            self.starts.append((name, seat.time_sliced))
            host = OneHost(self.clock, self.random)
            host.pid = max(pid for pid, c in self.host.children.items() if c.name == name)
            mesh = self.mesh(name, host)
            await mesh.join(
                self.process,
                stats=lambda: {
                    "generation": seat.generation,
                    "ready": name not in self.starts_slowly,
                },
            )
            try:
                await self.clock.sleep(self.ends_after_s)
            finally:
                await mesh.leave()

        return run

    def set_desired_state(self, *instances: Instance) -> None:
        self.instances.set_desired({w.name: w for w in map(make_desired_role, instances)})

    def tenancy(self, instance: Instance) -> ProcessSlot:
        [found] = [t for t in self.instances.slots if t.name == make_desired_role(instance).name]
        return found

    async def until(
        self, instance: Instance, doing: InstancePhase, within_s: float
    ) -> list[InstancePhase]:
        """Wait for a phase of the instance and return the phases before it."""
        seen: list[InstancePhase] = []
        until = self.clock.monotonic() + within_s
        while not seen or seen[-1] != doing:
            assert self.clock.monotonic() < until, (seen, self.detail(instance))
            await self.clock.sleep(0.05)
            process = self.tenancy(instance).process
            seen += [process.phase] if process is not None else []
        return seen

    def detail(self, instance: Instance) -> str:
        process = self.tenancy(instance).process
        return process.detail if process is not None else ""


def in_world(tmp_path: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random, tmp_path)
        await world.worker.join(None)
        async with world.instances:
            await story(world)
        await world.worker.leave()

    run_virtual(main, limit_s=3600.0)


@story_on(in_world, "tmp_path")
async def test_arriving_instance_waits_for_a_leaving_one_without_failing(world: World) -> None:
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.set_desired_state(HYBRID)
    await world.clock.sleep(DRAINS_S / 2)
    assert world.detail(HYBRID) == WAITING_FOR_ROOM
    assert InstancePhase.FAILED not in await world.until(HYBRID, InstancePhase.READY, 30.0)


@story_on(in_world, "tmp_path")
async def test_arriving_instance_starts_beside_a_leaving_one_only_if_it_fits(world: World) -> None:
    budgets = world.instances.context.budgets
    for limit_bytes, waits in (BYTES + BYTES // 2, True), (2 * BYTES, False):
        budgets.limits = TierBytes(accelerator=limit_bytes)
        for usage in TierBytes(accelerator=BYTES), TierBytes():  # of an earlier process
            budgets.record_usage("hybrid/g0.1", usage)
        world.set_desired_state(ENGINE)
        await world.until(ENGINE, InstancePhase.READY, 30.0)
        world.starts.clear()
        world.set_desired_state(HYBRID)
        await world.clock.sleep(DRAINS_S / 2)
        assert world.starts == ([] if waits else [("hybrid/g0.1", False)])
        assert world.detail(HYBRID) == (WAITING_FOR_ROOM if waits else "")
        await world.until(HYBRID, InstancePhase.READY, 30.0)
        world.set_desired_state()
        await world.clock.sleep(30.0)


@story_on(in_world, "tmp_path")
async def test_arriving_instance_fails_if_none_leaves(world: World) -> None:
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.set_desired_state(ENGINE, HYBRID)
    await world.until(HYBRID, InstancePhase.FAILED, 1.0)


@story_on(in_world, "tmp_path")
async def test_arriving_instance_waits_for_the_start_of_one_with_time_slices(world: World) -> None:
    first, guest = (replace(one, time_sliced=True) for one in (ENGINE, HYBRID))
    budgets = world.instances.context.budgets
    world.starts_slowly.add("engine/g0.0")
    world.set_desired_state(first)
    await world.clock.sleep(10.0)
    budgets.reserve("engine/g0.0", BYTES)  # as a warm start keeps its room
    world.set_desired_state(first, guest)
    await world.clock.sleep(120.0)
    slot = world.tenancy(guest)
    assert slot.process is not None and slot.process.phase == InstancePhase.STARTING
    assert world.detail(guest).startswith("waiting until engine/g0.0 can leave: hybrid/g0.1 needs")
    assert slot.process.restarts == 0 and world.starts == [("engine/g0.0", True)]
    budgets.limits = TierBytes(accelerator=2 * BYTES)
    world.starts_slowly.clear()
    assert InstancePhase.FAILED not in await world.until(guest, InstancePhase.READY, 30.0)


@story_on(in_world, "tmp_path")
async def test_arriving_instance_waits_for_the_end_of_a_piece_without_a_slice(
    world: World,
) -> None:
    world.instances.context.budgets.limits = TierBytes(accelerator=2 * BYTES)
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.process.has_ended_piece.clear()
    sliced, guest = replace(ENGINE, time_sliced=True, epoch=2), replace(HYBRID, time_sliced=True)
    world.set_desired_state(sliced, guest)
    await world.clock.sleep(10.0)
    assert world.process.slicing == [False, True]  # requested, and not confirmed
    assert world.starts == [("engine/g0.0", False)]
    assert world.detail(guest) == WAITING_FOR_SLICES
    world.process.has_ended_piece.set()
    await world.until(guest, InstancePhase.READY, 30.0)
    assert world.starts[1:] == [("hybrid/g0.1", True)]


@story_on(in_world, "tmp_path")
async def test_instances_that_sleep_wake_together_to_take_time_slices(world: World) -> None:
    world.instances.context.budgets.limits = TierBytes(accelerator=2 * BYTES)
    world.set_desired_state(ENGINE, HYBRID)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    await world.until(HYBRID, InstancePhase.READY, 30.0)
    asleep = [replace(one, tier=Tier.MEMORY, epoch=2) for one in (ENGINE, HYBRID)]
    world.set_desired_state(*asleep)
    await world.clock.sleep(5.0)
    awake = [replace(one, time_sliced=True, epoch=3) for one in (ENGINE, HYBRID)]
    world.set_desired_state(*awake)
    await world.clock.sleep(5.0)
    assert [world.detail(one) for one in awake] == ["", ""]
    assert world.process.requests[4:] == [Tier.ACCELERATOR] * 2
    assert world.process.slicing[4:] == [True, True]


@story_on(in_world, "tmp_path")
async def test_instance_wakes_when_the_other_takes_time_slices(world: World) -> None:
    world.instances.context.budgets.limits = TierBytes(accelerator=2 * BYTES)
    world.set_desired_state(ENGINE, HYBRID)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    await world.until(HYBRID, InstancePhase.READY, 30.0)
    world.set_desired_state(ENGINE, replace(HYBRID, tier=Tier.MEMORY, epoch=2))
    await world.clock.sleep(5.0)
    world.process.has_ended_piece.clear()
    awake = [replace(one, time_sliced=True, epoch=3) for one in (ENGINE, HYBRID)]
    world.set_desired_state(*awake)
    await world.clock.sleep(5.0)
    assert world.detail(HYBRID) == WAITING_FOR_SLICES
    assert world.process.requests[3:] == [Tier.ACCELERATOR]
    world.process.has_ended_piece.set()
    assert InstancePhase.MOVING in await world.until(HYBRID, InstancePhase.READY, 5.0)
    assert world.detail(HYBRID) == ""


@story_on(in_world, "tmp_path")
async def test_instance_takes_time_slices_until_the_others_have_left(world: World) -> None:
    world.instances.context.budgets.limits = TierBytes(accelerator=2 * BYTES)
    world.set_desired_state(replace(ENGINE, time_sliced=True), replace(HYBRID, time_sliced=True))
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    await world.until(HYBRID, InstancePhase.READY, 30.0)
    world.set_desired_state(replace(ENGINE, epoch=2))
    await world.clock.sleep(DRAINS_S / 2)
    assert world.process.slicing == [True, True, True]
    await world.instances.kill("g0.0", 1, "it restarts beside the leaving one")
    await world.clock.sleep(30.0)
    assert world.starts[2:] == [("engine/g0.0", True)]
    assert world.process.slicing[-1] is False
    await world.instances.kill("g0.0", 1, "it restarts alone")
    await world.clock.sleep(30.0)
    assert world.starts[3:] == [("engine/g0.0", False)]


@story_on(in_world, "tmp_path")
async def test_instance_that_goes_to_sleep_takes_time_slices_until_it_has_left(
    world: World,
) -> None:
    world.instances.context.budgets.limits = TierBytes(accelerator=2 * BYTES)
    stays, leaves = (replace(one, time_sliced=True) for one in (ENGINE, HYBRID))
    world.set_desired_state(stays, leaves)
    await world.until(stays, InstancePhase.READY, 30.0)
    await world.until(leaves, InstancePhase.READY, 30.0)
    world.process.has_ended_piece.clear()
    asleep = replace(leaves, tier=Tier.MEMORY, time_sliced=False, epoch=2)
    world.set_desired_state(stays, asleep)
    await world.clock.sleep(5.0)
    process = world.tenancy(asleep).process
    assert process is not None and process.is_time_sliced and process.is_moving
    world.process.has_ended_piece.set()
    await world.until(asleep, InstancePhase.READY, 5.0)
    await world.clock.sleep(5.0)
    assert world.process.requests[2:] == [Tier.MEMORY] * 2
    assert world.process.slicing[2:] == [True, False]
    assert not process.is_time_sliced


@story_on(in_world, "tmp_path")
async def test_instance_takes_time_slices_beside_one_that_fails_to_leave(world: World) -> None:
    world.instances.context.budgets.limits = TierBytes(accelerator=2 * BYTES)
    both = [replace(one, time_sliced=True) for one in (ENGINE, HYBRID)]
    world.set_desired_state(*both)
    for one in both:
        await world.until(one, InstancePhase.READY, 30.0)
    world.process.wrong[Tier.MEMORY] = StorageFull("no room", where="w0")
    asleep = replace(HYBRID, tier=Tier.MEMORY, epoch=2)
    world.set_desired_state(replace(ENGINE, epoch=2), asleep)
    await world.until(asleep, InstancePhase.FAILED, 5.0)
    await world.clock.sleep(5.0)
    processes = [world.tenancy(one).process for one in (ENGINE, HYBRID)]
    assert all(process is not None and process.is_time_sliced for process in processes)
    assert False not in world.process.slicing
    world.process.wrong.clear()
    await world.clock.sleep(TRY_AGAIN_S + 5.0)
    assert not any(process is not None and process.is_time_sliced for process in processes)
    assert world.process.slicing[-2:] == [False, False]


@story_on(in_world, "tmp_path")
async def test_process_that_exits_while_it_is_drained_is_not_restarted(world: World) -> None:
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.set_desired_state()
    await world.clock.sleep(DRAINS_S / 2)
    await world.instances.kill("g0.0", 1, "it hangs")
    await world.clock.sleep(30.0)
    assert world.starts == [("engine/g0.0", False)]
    assert not world.instances.slots


@story_on(in_world, "tmp_path")
async def test_new_desired_state_is_tried_at_once_after_a_failure(
    world: World,
) -> None:
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.process.wrong[Tier.DISK] = StorageFull("no room", where="/kept")
    world.set_desired_state(replace(ENGINE, tier=Tier.DISK, epoch=2))
    await world.until(ENGINE, InstancePhase.FAILED, 1.0)
    assert "no room" in world.detail(ENGINE)
    world.set_desired_state(replace(ENGINE, tier=Tier.MEMORY, epoch=3))
    process = world.tenancy(ENGINE).process
    assert process is not None and process.phase == InstancePhase.MOVING
    assert InstancePhase.FAILED not in await world.until(ENGINE, InstancePhase.READY, 1.0)
    assert process.tier == Tier.MEMORY


@story_on(in_world, "tmp_path")
async def test_lasting_error_becomes_a_failure_and_a_passing_one_does_not(
    world: World,
) -> None:
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 30.0)
    world.process.wrong[Tier.DISK] = RemoteFailure("OSError: Input/output error")
    world.set_desired_state(replace(ENGINE, tier=Tier.DISK, epoch=2))
    await world.until(ENGINE, InstancePhase.MOVING, 1.0)
    await world.clock.sleep(SET_TIER_ERROR_TOLERANCE_S / 2)
    assert world.tenancy(ENGINE).process.phase == InstancePhase.MOVING  # type: ignore[union-attr]
    await world.until(ENGINE, InstancePhase.FAILED, SET_TIER_ERROR_TOLERANCE_S)
    assert "Input/output error" in world.detail(ENGINE)
    requests = len(world.process.requests)
    await world.clock.sleep(TRY_AGAIN_S / 2)
    assert len(world.process.requests) == requests
    del world.process.wrong[Tier.DISK]
    await world.until(ENGINE, InstancePhase.READY, TRY_AGAIN_S)


def test_logs_of_removed_instances_do_not_accumulate(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for number in range(MAX_OLD_LOGS + 2):
            one = replace(ENGINE, id=f"g{number}.0")
            world.set_desired_state(one)
            world.instances.context.log_path(f"engine/{one.id}").write_text("said")
            await world.clock.sleep(0.2)
            world.set_desired_state()
            await world.clock.sleep(12.0)

    in_world(tmp_path, story)
    assert len(list(tmp_path.glob("*.log"))) == MAX_OLD_LOGS
    assert not (tmp_path / "engine-g1.0.log").exists()


@story_on(in_world, "tmp_path")
async def test_process_that_exited_after_a_long_run_restarts_soon(world: World) -> None:
    world.ends_after_s = 10.0
    world.set_desired_state(ENGINE)
    await world.until(ENGINE, InstancePhase.READY, 5.0)
    again = await world.until(ENGINE, InstancePhase.STARTING, 11.0)
    world.ends_after_s = 1e9
    again += await world.until(ENGINE, InstancePhase.READY, RESTART_AFTER_SUCCESS_S + 5.0)
    assert InstancePhase.FAILED not in again


NAME, HOST, TRAINER = "trainer/j", "here", "meshrl.services.trainer"


@dataclass
class LoadingWorld:
    """Worker's mesh, its role process, and the stats that the process publishes."""

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

    async def poll(self, seconds: float, publish: Callable[[float], dict[str, Any]]) -> None:
        """Poll the role every ten seconds after the process has published its stats."""
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
async def test_loading_with_progress_has_no_time_limit(world: LoadingWorld) -> None:
    await world.poll(3600.0, lambda now: {"progress": [int(now) // 250, 0.0]})
    assert world.starts == 1 and not world.role.is_ready
    await world.poll(20.0, lambda now: {"ready": True, "progress": [99, 0.0]})
    assert world.role.is_ready


@story_on(while_loading)
async def test_loading_without_progress_is_killed_and_restarted(world: LoadingWorld) -> None:
    await world.poll(NO_PROGRESS_TIMEOUT_S - 20.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 1
    await world.poll(60.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 2 and world.role.restarts == 1


@story_on(while_loading)
async def test_process_that_publishes_no_progress_is_killed(world: LoadingWorld) -> None:
    await world.poll(NO_PROGRESS_TIMEOUT_S - 20.0, lambda now: {})
    assert world.starts == 1
    await world.poll(60.0, lambda now: {})
    assert world.starts == 2


@story_on(while_loading)
async def test_loading_limit_does_not_count_pauses_of_the_job(world: LoadingWorld) -> None:
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
    await world.poll(3 * NO_PROGRESS_TIMEOUT_S, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 1
    await pool.write_decisions(world.state, led, "go on", [SetBlockReason("j", "", why)], None)
    await world.poll(NO_PROGRESS_TIMEOUT_S - 50.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 1
    await world.poll(90.0, lambda now: {"progress": [1, 0.5]})
    assert world.starts == 2


@story_on(while_loading)
async def test_process_exit_wakes_the_worker_at_once(world: LoadingWorld) -> None:
    await world.poll(5.0, lambda now: {"ready": True})
    assert world.role.is_ready
    world.news.clear()
    [child] = world.role.supervisor.children.values()
    child.kill()
    async with world.clock.timeout(0.1, "the news"):
        await world.news.wait()
    assert not world.role.is_ready and world.role.phase == InstancePhase.STARTING
