"""Time slices that a gang's scheduler grants: one instance computes at a time. The tests kill, hang
and cancel holders, and request slices too early.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from meshrl.common.api.node import AcquireSlice, ExplainSlices, Worker
from meshrl.common.base.errors import DeadlineExceeded, MeshError, Refused
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.time_slices import SliceClient, UsedSlice
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.calls.deadline_timer import PROBE_INTERVAL_S
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.state.pool.demand.profiles import FunctionProfile, TimeStatistics
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role
from meshrl.services.node.slices.residency import Residency
from meshrl.services.node.slices.slice_calls import SliceCallsMixin
from meshrl.services.node.slices.slice_queue import SliceLimits
from meshrl.services.node.slices.slice_scheduler import REMOVED_INSTANCE_GRACE_S, SliceScheduler
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork
from tests.meshes import make_virtual_mesh
from tests.stories import story_on, virtual_test
from tests.unit.node.time_slices.fully_resident import FullyResident

LEASES = SliceLimits(factor=2.0, floor_s=5.0, cap_s=60.0, default_s=20.0)
MINE = (
    *("acquire_slice", "release_slice", "kill_instance"),
    *("prepare_residency", "read_residency", "explain_slices"),
)


def make_rejection(method: Any) -> Any:
    async def reject(self: SliceCallsMixin, request: Any) -> Any:
        raise Refused("a scheduler of time slices and nothing else")

    return call(method)(reject)


REST = {name: make_rejection(method) for name, method in Worker.methods.items() if name not in MINE}


class Stage:
    """Two workers of a gang of two, with instances on either and on both."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.state = open_simulated_state(clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.residencies: dict[str, Residency] = {}  # by worker; missing: everything is resident
        self.computing: list[tuple[str, float, float]] = []
        self.kills: list[tuple[str, str, int]] = []  # worker, instance, generation
        self.kill_errors: dict[str, list[MeshError]] = {}  # by worker: of its first kills
        self.gang = Gang(
            "g0",
            ("w0", "w1"),
            1,
            (
                Instance("g0.0", "j", Role.ROLLOUT, time_sliced=True),
                Instance("g0.1", "j", Role.TRAINING, core=True, ranks=(0, 1), time_sliced=True),
                Instance("g0.2", "k", Role.ROLLOUT, ranks=(1,), time_sliced=True),
            ),
        )

    def mesh(self, name: str) -> Mesh:
        return make_virtual_mesh(name, self.state, self.network, self.clock, self.random)

    async def workers(self) -> tuple[Mesh, SliceScheduler]:
        await self.worker("w1")
        return await self.worker("w0")

    async def worker(self, worker: str) -> tuple[Mesh, SliceScheduler]:
        mesh = self.mesh(f"worker/{worker}")

        async def kill(instance: str, generation: int, why: str) -> None:
            await self.clock.sleep(1.0)
            self.kills.append((worker, instance, generation))
            if errors := self.kill_errors.get(worker):
                raise errors.pop()

        actor = type("OnlyTurns", (SliceCallsMixin,), {"interface": Worker, **REST})()
        residency = self.residencies.get(worker, FullyResident())
        actor.slice_scheduler = SliceScheduler(mesh, worker, kill, residency, LEASES)
        actor.slice_scheduler.set_gang(self.gang)
        await mesh.join(actor)
        self.running = asyncio.create_task(actor.slice_scheduler.run())
        return mesh, actor.slice_scheduler

    async def join_instance(self, number: int, *, generation: int = 1) -> tuple[Mesh, SliceClient]:
        mesh = self.mesh(f"engine/g0.{number}")
        await mesh.join(None)
        return mesh, SliceClient(mesh, "worker/w0", f"g0.{number}", generation, enabled=True)

    async def compute(self, name: str, turns: SliceClient, lasts_s: float, times: int = 1) -> None:
        for _ in range(times):
            async with turns.time_slice("generate"):
                started_s = self.clock.monotonic()
                await self.clock.sleep(lasts_s)
                self.computing.append((name, started_s, self.clock.monotonic()))

    def overlaps(self, *names: str) -> bool:
        mine = sorted((b, e) for n, b, e in self.computing if n in names)
        return any(end > begin for (_, end), (begin, _) in itertools.pairwise(mine))


def on_stage(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(Stage(clock, random))

    run_virtual(main, limit_s=7200.0)


@pytest.mark.parametrize("lost", ["request", "answer"])
@virtual_test(limit_s=7200.0)
async def test_lost_message_delays_a_slice_by_seconds(
    clock: VirtualClock, random: Random, lost: str
) -> None:
    stage = Stage(clock, random)
    worker, scheduler = await stage.workers()
    (_, a), (mesh, b) = [await stage.join_instance(i) for i in range(2)]
    await stage.compute("b", b, 0.1)
    ends = mesh.transport.address, worker.transport.address
    ticket = await a.acquire_slice("generate")
    if lost == "request":
        stage.network.partition(*ends)
    waiting = asyncio.create_task(stage.compute("b", b, 0.1))
    await clock.sleep(1.0)
    stage.network.partition(*ends)
    a.release_slice(ticket, "generate", 1.0)
    await clock.sleep(1.0)
    stage.network.heal(*ends)
    async with clock.timeout(2 * PROBE_INTERVAL_S, "the slice whose message was lost"):
        await waiting
    await clock.sleep(1.0)
    assert (scheduler.granted_count, scheduler.stats().slice_holders, stage.kills) == (3, [], [])


@story_on(on_stage)
async def test_instances_on_one_worker_compute_in_sequence_and_all_progress(
    stage: Stage,
) -> None:
    await stage.workers()
    (_, a), (_, b), (_, c) = [await stage.join_instance(i) for i in range(3)]
    await asyncio.gather(
        stage.compute("a", a, 0.2, times=20),
        stage.compute("b", b, 1.0, times=20),
        stage.compute("c", c, 0.2, times=20),
    )
    assert not stage.overlaps("a", "b")
    assert not stage.overlaps("b", "c")
    assert stage.overlaps("a", "c")  # they share no rank
    for _, _begin, end in [row for row in stage.computing if row[0] == "b"][:18]:
        after = [n for n, b, _ in stage.computing if end <= b < end + 0.6]
        assert "a" in after  # each instance waits for at most one slice of another
    assert {t.slice_count for t in (a, b, c)} == {20}
    assert a.estimate_s("generate") == pytest.approx(0.2)


@story_on(on_stage)
async def test_granted_slice_names_the_wait_for_other_jobs(stage: Stage) -> None:
    _, scheduler = await stage.workers()
    (_, engine), (_, core), (_, other) = [await stage.join_instance(i) for i in range(3)]
    used: list[UsedSlice] = []
    core.on_release = engine.on_release = used.append
    first = asyncio.create_task(stage.compute("other", other, 2.0))
    await stage.clock.sleep(0.5)
    waiting = asyncio.create_task(stage.compute("core", core, 1.0))
    await stage.clock.sleep(1.0)
    [request] = scheduler.explain(ExplainSlices(0.0)).waiting
    assert (request.instance, request.function) == ("g0.1", "generate")
    assert request.wait_s == pytest.approx(1.0, abs=0.1)
    await asyncio.gather(waiting, first)
    assert scheduler.explain(ExplainSlices(0.0)).waiting == []
    await stage.compute("engine", engine, 1.0)
    assert [round(one.other_jobs_s, 1) for one in used] == [1.5, 0.0]
    assert used[0].granted_s - used[0].requested_s == pytest.approx(1.5, abs=0.1)
    assert used[0].switch_s == pytest.approx(0.0, abs=0.1)


@story_on(on_stage)
async def test_first_request_has_the_profiles_estimate_and_time_to_compile(stage: Stage) -> None:
    _, scheduler = await stage.workers()
    _, turns = await stage.join_instance(0)
    durations = TimeStatistics(1.0, 0.5, 0.5, {52: 1.0})
    turns.profile.set_stored({"generate": FunctionProfile(durations)})
    await stage.compute("first", turns, LEASES.default_s - 1.0)  # beyond the limit of later pieces
    [decision] = scheduler.explain(ExplainSlices(0.0)).decisions
    assert decision.candidates[0].service_s == 0.5
    assert scheduler.killed_count == 0


@pytest.mark.parametrize("failed_kills", [0, 1])
@story_on(on_stage)
async def test_slice_of_an_exited_first_rank_is_free_when_the_other_ranks_are_dead(
    stage: Stage, failed_kills: int
) -> None:
    _, scheduler = await stage.workers()
    (first, core), (_, other) = [await stage.join_instance(i) for i in (1, 2)]
    stage.kill_errors["w1"] = [DeadlineExceeded("it has not exited")] * failed_kills
    await core.acquire_slice("train_step")
    waiting = asyncio.create_task(stage.compute("other", other, 0.2))
    await stage.clock.sleep(1.0)
    died_s = stage.clock.monotonic()
    await first.leave()
    scheduler.release_instance("g0.1")
    scheduler.release_instance("g0.1")  # its next process exits too
    _, again = await stage.join_instance(1)
    await asyncio.gather(waiting, stage.compute("core", again, 0.2))
    [(_, started_s, _)] = [row for row in stage.computing if row[0] == "other"]
    least_s = 1.0 + failed_kills  # each kill takes a second
    assert died_s + least_s <= started_s < died_s + least_s + 1.0 + 3.0 * failed_kills
    assert stage.kills == [("w1", "g0.1", 1)] * (1 + failed_kills)


@story_on(on_stage)
async def test_start_on_another_worker_frees_the_slice_of_the_process_before(stage: Stage) -> None:
    await stage.workers()
    died, engine = await stage.join_instance(2)
    await engine.acquire_slice("generate")
    await died.leave()
    starter = stage.mesh("starter")
    start = SliceClient(starter, "worker/w0", "g0.2", 1, enabled=True, starts_process=True)
    began_s = stage.clock.monotonic()
    await stage.compute("start", start, 0.2)
    assert stage.clock.monotonic() < began_s + 1.0


@story_on(on_stage)
async def test_exit_of_a_process_keeps_a_workers_request_and_fails_its_own(stage: Stage) -> None:
    mesh, scheduler = await stage.workers()
    (_, other), (engine, _) = [await stage.join_instance(i) for i in (1, 0)]
    ticket = await other.acquire_slice("train_step")
    start = SliceClient(mesh, "worker/w0", "g0.0", 1, enabled=True)
    starting = asyncio.create_task(stage.compute("start", start, 0.2))
    request = AcquireSlice("g0.0", 1, engine.name, engine.incarnation, 1, "generate", 0.0, [])
    waiting = asyncio.create_task(engine.ref("worker/w0").call(Worker.acquire_slice, request))
    await stage.clock.sleep(1.0)
    scheduler.release_instance("g0.0")
    with pytest.raises(ServiceUnavailable):
        await waiting
    other.release_slice(ticket, "train_step", 1.0)
    async with stage.clock.timeout(2.0, "the slice of the worker"):
        await starting


@pytest.mark.parametrize("survives_on", ["", "w0", "w1"])
@story_on(on_stage)
async def test_overdue_holder_is_killed_on_all_its_workers_until_it_is_dead(
    stage: Stage, survives_on: str
) -> None:
    _, scheduler = await stage.workers()
    (_, engine), (_, core) = [await stage.join_instance(i) for i in (0, 1)]
    stage.kill_errors[survives_on] = [DeadlineExceeded("it has not exited")] * 2
    await core.acquire_slice("train_step")
    requested_s = stage.clock.monotonic()
    waiting = asyncio.create_task(stage.compute("engine", engine, 0.2))
    await stage.clock.sleep(LEASES.default_s + 2.0)
    shown = scheduler.explain(ExplainSlices(0.0)).kill_errors
    assert [text.partition(":")[0] for text in shown] == (
        [f"g0.1 on {survives_on} was not killed"] if survives_on else []
    )
    await waiting
    assert scheduler.explain(ExplainSlices(0.0)).kill_errors == []
    [(_, started_s, _)] = stage.computing
    waited_s = started_s - requested_s - LEASES.default_s
    assert waited_s >= 3.0 if survives_on else 1.0 <= waited_s <= 3.0  # each kill takes a second
    repeated = 2 * [(survives_on, "g0.1", 1)] if survives_on else []
    assert sorted(stage.kills) == sorted([("w0", "g0.1", 1), ("w1", "g0.1", 1), *repeated])
    assert scheduler.stats().killed_slices == 1
    assert scheduler.explain(ExplainSlices(0.0)).slices[0].end == "killed"


@story_on(on_stage)
async def test_restarted_first_rank_outlives_the_kills_of_a_surviving_rank(stage: Stage) -> None:
    _, scheduler = await stage.workers()
    (first, core), (_, other) = [await stage.join_instance(i) for i in (1, 2)]
    stage.kill_errors = {one: [DeadlineExceeded("it has not exited")] for one in ("w0", "w1")}
    await core.acquire_slice("train_step")
    waiting = asyncio.create_task(stage.compute("other", other, 0.2))
    await stage.clock.sleep(LEASES.default_s + 2.0)
    assert len(stage.kills) == 2  # both have failed
    await first.leave()
    scheduler.release_instance("g0.1")
    await stage.join_instance(1)
    await waiting
    assert stage.kills[2:] == [("w1", "g0.1", 1)]


@story_on(on_stage)
async def test_lost_worker_ends_with_its_process_of_an_overdue_holder(stage: Stage) -> None:
    lost, _ = await stage.worker("w1")
    await stage.worker("w0")
    (_, engine), (_, core) = [await stage.join_instance(i) for i in (0, 1)]
    await core.acquire_slice("train_step")
    await lost.leave()
    async with stage.clock.timeout(LEASES.default_s + 30.0, "the slice of the engine"):
        await stage.compute("engine", engine, 0.2)
    assert stage.kills == [("w0", "g0.1", 1)]


@virtual_test()
async def test_host_suspension_extends_the_deadlines_of_holders(
    clock: VirtualClock, random: Random
) -> None:
    stage = Stage(clock, random)
    kills: list[str] = []

    async def kill(instance: str, generation: int, why: str) -> None:
        kills.append(instance)
        scheduler.release_instance(instance)  # as a worker does when a process has exited

    scheduler = SliceScheduler(stage.mesh("worker/w0"), "w0", kill, FullyResident(), LEASES)
    scheduler.set_gang(stage.gang)
    running = asyncio.create_task(scheduler.run())
    await scheduler.acquire(AcquireSlice("g0.0", 1, "engine/g0.0", "a", 1, "generate", 3.0, []))
    await clock.sleep(1.0)
    cast(VirtualLoop, asyncio.get_running_loop()).now_s += 600.0  # the scheduler polls first
    await clock.sleep(3.0)
    assert scheduler.stats().slice_holders == ["g0.0"] and kills == []
    await clock.sleep(5.0)
    assert scheduler.stats().slice_holders == [] and kills == ["g0.0"]
    assert [one.end for one in scheduler.explain(ExplainSlices(0.0)).slices] == ["killed"]
    running.cancel()


@story_on(on_stage)
async def test_restarted_process_is_not_killed_for_its_predecessors_slice(stage: Stage) -> None:
    await stage.workers()
    (dies, core), (_, engine) = [await stage.join_instance(i) for i in (1, 0)]
    await core.acquire_slice("train_step")
    await dies.leave()
    await stage.join_instance(1)
    started_s = stage.clock.monotonic()
    await stage.compute("engine", engine, 0.2)
    assert stage.clock.monotonic() - started_s < LEASES.floor_s
    assert stage.kills == []


@story_on(on_stage)
async def test_cancelled_computation_releases_its_slice_or_request(stage: Stage) -> None:
    _, scheduler = await stage.workers()
    (_, a), (_, b) = [await stage.join_instance(i) for i in (0, 1)]
    holds = asyncio.create_task(stage.compute("a", a, 100.0))
    await stage.clock.sleep(1.0)
    waits = asyncio.create_task(stage.compute("b", b, 1.0))
    await stage.clock.sleep(1.0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    holds.cancel()
    await stage.clock.sleep(1.0)
    assert scheduler.stats().slice_holders == []
    await stage.compute("b", b, 1.0)
    assert stage.kills == []


@story_on(on_stage)
async def test_abandoned_computation_keeps_its_slice_to_its_end(
    stage: Stage,
) -> None:
    await stage.workers()
    (_, a), (_, b) = [await stage.join_instance(i) for i in (0, 1)]

    async def work() -> None:
        await stage.clock.sleep(3.0)
        stage.computing.append(("a", started_s, stage.clock.monotonic()))

    started_s = stage.clock.monotonic()
    cancelled = asyncio.create_task(a.run_in_slice("train_step", work))
    await stage.clock.sleep(1.0)
    cancelled.cancel()
    await stage.compute("b", b, 1.0)
    assert [name for name, _, _ in stage.computing] == ["a", "b"]
    assert not stage.overlaps("a", "b")


@story_on(on_stage)
async def test_restarted_scheduler_receives_requests_again(stage: Stage) -> None:
    mesh, _ = await stage.workers()
    (_, a), (_, b) = [await stage.join_instance(i) for i in (0, 1)]
    holding = asyncio.create_task(stage.compute("a", a, 3.0))
    await stage.clock.sleep(1.0)
    waiting = asyncio.create_task(stage.compute("b", b, 1.0))
    await stage.clock.sleep(1.0)
    stage.running.cancel()
    await mesh.leave()
    await stage.worker("w0")
    await asyncio.gather(holding, waiting)
    assert {name for name, _, _ in stage.computing} == {"a", "b"}
    assert stage.kills == []


@story_on(on_stage)
async def test_request_before_the_record_is_read_is_granted_later(stage: Stage) -> None:
    whole = stage.gang
    stage.gang = replace(whole, instances=whole.instances[:1])
    _, scheduler = await stage.workers()
    _, core = await stage.join_instance(1)
    asking = asyncio.create_task(stage.compute("core", core, 0.1))
    await stage.clock.sleep(2.0)
    assert not asking.done()
    scheduler.set_gang(whole)
    await stage.clock.sleep(1.0)
    assert asking.done()


@story_on(on_stage)
async def test_removed_instance_is_killed_unless_it_releases_its_slice_in_time(
    stage: Stage,
) -> None:
    _, scheduler = await stage.workers()
    (_, engine), (_, core) = [await stage.join_instance(i) for i in (0, 1)]
    core._longest_s["train_step"] = 30.0  # from earlier computations
    await core.acquire_slice("train_step")
    scheduler.set_gang(replace(stage.gang, instances=stage.gang.instances[:1]))
    started_s = stage.clock.monotonic()
    await stage.compute("engine", engine, 0.2)
    assert stage.clock.monotonic() - started_s == pytest.approx(
        REMOVED_INSTANCE_GRACE_S + 1.0, abs=1.5
    )
    assert sorted(stage.kills) == [("w0", "g0.1", 1), ("w1", "g0.1", 1)]


@story_on(on_stage)
async def test_slices_are_acquired_only_when_enabled_and_never_nested(
    stage: Stage,
) -> None:
    _, scheduler = await stage.workers()
    _, turns = await stage.join_instance(0)
    await turns.set_enabled(False)
    free = asyncio.create_task(stage.compute("free", turns, 2.0))
    await stage.clock.sleep(1.0)
    await turns.set_enabled(True)  # waits for computations without a slice
    assert free.done()
    assert scheduler.granted_count == 0
    async with turns.time_slice("generate"):
        with pytest.raises(Refused, match="starts within a time slice"):
            async with turns.time_slice("sync"):
                pass
    assert scheduler.granted_count == 1


@story_on(on_stage)
async def test_generation_not_on_record_gets_no_slice(stage: Stage) -> None:
    await stage.workers()
    mesh, _ = await stage.join_instance(0)
    old = AcquireSlice("g0.0", 0, mesh.name, mesh.incarnation, 1, "generate", 1.0, [])
    with pytest.raises(ServiceUnavailable, match="generation 0"):
        await mesh.ref("worker/w0").call(Worker.acquire_slice, old)
