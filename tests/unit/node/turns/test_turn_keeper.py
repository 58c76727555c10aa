"""Residents take turns through the keeper of their gang: one computes at a time, whoever dies,
hangs, is cancelled or asks too early.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from meshrl.common.api.node import AcquireSlice, Worker
from meshrl.common.base.errors import Refused
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.state.pool.workers.rows import Gang, Instance, Role
from meshrl.services.node.instances.slice_scheduler import (
    REMOVED_INSTANCE_GRACE_S,
    SliceCallsMixin,
    SliceScheduler,
)
from meshrl.services.node.instances.time_slices import SliceLimits
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedHost
from tests.stories import story_on, virtually

LEASES = SliceLimits(factor=2.0, floor_s=5.0, cap_s=60.0, default_s=20.0)
MINE = ("acquire_slice", "release_slice", "kill_instance")


def refusing(method: Any) -> Any:
    async def refuse(self: SliceCallsMixin, request: Any) -> Any:
        raise Refused("a keeper of turns and nothing else")

    return call(method)(refuse)


REST = {name: refusing(method) for name, method in Worker.methods.items() if name not in MINE}


class Stage:
    """Two workers of a gang of two, and residents on either and on both."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.state = open_simulated_state(clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.computing: list[tuple[str, float, float]] = []
        self.killed: list[tuple[str, str, int]] = []  # worker, resident, generation
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
        return Mesh(
            name,
            name.partition("/")[0],
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem://{name}/{self.random.random()}"),
                clock=self.clock,
                random=Random(self.random.randrange(1 << 30)),
                host=SimulatedHost(self.clock, self.random.child(f"host {name}")),
            ),
        )

    async def worker(self, worker: str) -> tuple[Mesh, SliceScheduler]:
        mesh = self.mesh(f"worker/{worker}")

        async def kill(resident: str, generation: int, why: str) -> None:
            await self.clock.sleep(1.0)
            self.killed.append((worker, resident, generation))

        actor = type("OnlyTurns", (SliceCallsMixin,), {"interface": Worker, **REST})()
        actor.slice_scheduler = SliceScheduler(mesh, worker, kill, LEASES)
        actor.slice_scheduler.set_gang(self.gang)
        await mesh.join(actor)
        self.running = asyncio.create_task(actor.slice_scheduler.run())
        return mesh, actor.slice_scheduler

    async def resident(self, number: int, *, generation: int = 1) -> tuple[Mesh, SliceClient]:
        mesh = self.mesh(f"engine/g0.{number}")
        await mesh.join(None)
        return mesh, SliceClient(mesh, "worker/w0", f"g0.{number}", generation, enabled=True)

    async def computes(self, name: str, turns: SliceClient, lasts_s: float, times: int = 1) -> None:
        for _ in range(times):
            async with turns.time_slice("generate"):
                began = self.clock.monotonic()
                await self.clock.sleep(lasts_s)
                self.computing.append((name, began, self.clock.monotonic()))

    def overlapping(self, *names: str) -> bool:
        mine = sorted((b, e) for n, b, e in self.computing if n in names)
        return any(end > begin for (_, end), (begin, _) in itertools.pairwise(mine))


def on_stage(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(Stage(clock, random))

    run_virtual(main, limit_s=7200.0)


@story_on(on_stage)
async def test_those_that_share_a_worker_compute_one_after_the_other_and_all_progress(
    stage: Stage,
) -> None:
    await stage.worker("w0")
    (_, a), (_, b), (_, c) = [await stage.resident(i) for i in range(3)]
    await asyncio.gather(
        stage.computes("a", a, 0.2, times=20),
        stage.computes("b", b, 1.0, times=20),
        stage.computes("c", c, 0.2, times=20),
    )
    assert not stage.overlapping("a", "b")
    assert not stage.overlapping("b", "c")
    assert stage.overlapping("a", "c")  # they share no rank
    for _, _begin, end in [row for row in stage.computing if row[0] == "b"][:18]:
        after = [n for n, b, _ in stage.computing if end <= b < end + 0.6]
        assert "a" in after  # nobody waits for more than one turn of another
    assert {t.slice_count for t in (a, b, c)} == {20}
    assert a.estimate_s("generate") == pytest.approx(0.2)


@story_on(on_stage)
async def test_a_holder_that_gives_nothing_back_is_killed_on_all_its_workers_and_the_next_goes_on(
    stage: Stage,
) -> None:
    _, keeper = await stage.worker("w0")
    await stage.worker("w1")
    (_, engine), (_, core) = [await stage.resident(i) for i in (0, 1)]
    await core.acquire_slice("train_step")
    began = stage.clock.monotonic()
    await stage.computes("engine", engine, 0.2)
    waited = stage.clock.monotonic() - began
    assert LEASES.default_s + 1.0 <= waited <= LEASES.default_s + 3.0  # until it was dead
    assert sorted(stage.killed) == [("w0", "g0.1", 1), ("w1", "g0.1", 1)]
    assert keeper.stats().turns_killed == 1


@virtually()
async def test_a_host_that_stood_still_gives_its_holders_the_time_that_they_had_left(
    clock: VirtualClock, random: Random
) -> None:
    stage = Stage(clock, random)
    killed: list[str] = []

    async def kill(resident: str, generation: int, why: str) -> None:
        killed.append(resident)

    keeper = SliceScheduler(stage.mesh("worker/w0"), "w0", kill, LEASES)
    keeper.set_gang(stage.gang)
    running = asyncio.create_task(keeper.run())
    await keeper.acquire(AcquireSlice("g0.0", 1, "engine/g0.0", "a", 1, "generate", 3.0))
    await clock.sleep(1.0)
    cast(VirtualLoop, asyncio.get_running_loop()).now_s += 600.0  # the keeper looks first
    await clock.sleep(3.0)
    assert keeper.stats().turn_of == ["g0.0"] and killed == []
    await clock.sleep(5.0)
    assert keeper.stats().turn_of == [] and killed == ["g0.0"]
    running.cancel()


@story_on(on_stage)
async def test_the_next_start_of_a_holder_that_has_died_is_not_killed_for_it(stage: Stage) -> None:
    await stage.worker("w0")
    (dies, core), (_, engine) = [await stage.resident(i) for i in (1, 0)]
    await core.acquire_slice("train_step")
    await dies.leave()
    await stage.resident(1)
    began = stage.clock.monotonic()
    await stage.computes("engine", engine, 0.2)
    assert stage.clock.monotonic() - began < LEASES.floor_s
    assert stage.killed == []


@story_on(on_stage)
async def test_who_is_cancelled_gives_back_what_it_held_or_waited_for(stage: Stage) -> None:
    _, keeper = await stage.worker("w0")
    (_, a), (_, b) = [await stage.resident(i) for i in (0, 1)]
    holds = asyncio.create_task(stage.computes("a", a, 100.0))
    await stage.clock.sleep(1.0)
    waits = asyncio.create_task(stage.computes("b", b, 1.0))
    await stage.clock.sleep(1.0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    holds.cancel()
    await stage.clock.sleep(1.0)
    assert keeper.stats().turn_of == []
    await stage.computes("b", b, 1.0)
    assert stage.killed == []


@story_on(on_stage)
async def test_a_piece_that_nobody_waits_for_any_more_keeps_its_turn_to_its_end(
    stage: Stage,
) -> None:
    await stage.worker("w0")
    (_, a), (_, b) = [await stage.resident(i) for i in (0, 1)]

    async def work() -> None:
        await stage.clock.sleep(3.0)
        stage.computing.append(("a", began, stage.clock.monotonic()))

    began = stage.clock.monotonic()
    cancelled = asyncio.create_task(a.run_in_slice("train_step", work))
    await stage.clock.sleep(1.0)
    cancelled.cancel()
    await stage.computes("b", b, 1.0)
    assert [name for name, _, _ in stage.computing] == ["a", "b"]
    assert not stage.overlapping("a", "b")


@story_on(on_stage)
async def test_a_keeper_that_starts_again_is_asked_again(stage: Stage) -> None:
    mesh, _ = await stage.worker("w0")
    (_, a), (_, b) = [await stage.resident(i) for i in (0, 1)]
    holding = asyncio.create_task(stage.computes("a", a, 3.0))
    await stage.clock.sleep(1.0)
    waiting = asyncio.create_task(stage.computes("b", b, 1.0))
    await stage.clock.sleep(1.0)
    stage.running.cancel()
    await mesh.leave()
    await stage.worker("w0")
    await asyncio.gather(holding, waiting)
    assert {name for name, _, _ in stage.computing} == {"a", "b"}
    assert stage.killed == []


@story_on(on_stage)
async def test_who_asks_before_the_keeper_has_read_of_it_is_served_soon_after(stage: Stage) -> None:
    whole = stage.gang
    stage.gang = replace(whole, instances=whole.instances[:1])
    _, keeper = await stage.worker("w0")
    _, core = await stage.resident(1)
    asking = asyncio.create_task(stage.computes("core", core, 0.1))
    await stage.clock.sleep(2.0)
    assert not asking.done()
    keeper.set_gang(whole)
    await stage.clock.sleep(1.0)
    assert asking.done()


@story_on(on_stage)
async def test_a_resident_that_leaves_the_record_is_ended_unless_it_gives_its_turn_back_soon(
    stage: Stage,
) -> None:
    _, keeper = await stage.worker("w0")
    await stage.worker("w1")
    (_, engine), (_, core) = [await stage.resident(i) for i in (0, 1)]
    core._longest_s["train_step"] = 30.0  # by the pieces before
    await core.acquire_slice("train_step")
    keeper.set_gang(replace(stage.gang, instances=stage.gang.instances[:1]))
    began = stage.clock.monotonic()
    await stage.computes("engine", engine, 0.2)
    assert stage.clock.monotonic() - began == pytest.approx(REMOVED_INSTANCE_GRACE_S + 1.0, abs=1.5)
    assert sorted(stage.killed) == [("w0", "g0.1", 1), ("w1", "g0.1", 1)]


@story_on(on_stage)
async def test_turns_are_taken_only_where_they_are_and_a_turn_within_a_turn_is_refused(
    stage: Stage,
) -> None:
    _, keeper = await stage.worker("w0")
    _, turns = await stage.resident(0)
    await turns.set_enabled(False)
    free = asyncio.create_task(stage.computes("free", turns, 2.0))
    await stage.clock.sleep(1.0)
    await turns.set_enabled(True)  # waits for what runs without
    assert free.done()
    assert keeper.granted_count == 0
    async with turns.time_slice("generate"):
        with pytest.raises(Refused, match="begins within a turn"):
            async with turns.time_slice("sync"):
                pass
    assert keeper.granted_count == 1


@story_on(on_stage)
async def test_a_generation_that_is_not_on_record_gets_no_turn(stage: Stage) -> None:
    await stage.worker("w0")
    mesh, _ = await stage.resident(0)
    old = AcquireSlice("g0.0", 0, mesh.name, mesh.incarnation, 1, "generate", 1.0)
    with pytest.raises(ServiceUnavailable, match="generation 0"):
        await mesh.ref("worker/w0").call(Worker.acquire_slice, old)
