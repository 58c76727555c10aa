"""A role process that starts has all the time that it needs, while it gets on; its end is news."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import jobs, leader, registry
from meshrl.common.state.pool.placing.decisions import Admit, Why
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.rows import Doing
from meshrl.common.state.redis.keys import PLANNER
from meshrl.services.node.residents.startup import LOADING_S
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.node.standing import CORE, role_process

NAME, HOST, TRAINER = "trainer/j", "here", "meshrl.services.trainer"


@dataclass
class World:
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
        entry = registry.Entry(NAME, "trainer", host=HOST, pid=self.role.pid, incarnation="a")
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until and self.starts == 1:
            about = {"generation": CORE.generation, "ready": False}
            entry.stats = about | publish(self.clock.monotonic())
            await registry.register(self.state, entry, 60_000)
            await self.role.look()
            await self.clock.sleep(10.0)


def in_world(story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random)
        await world.role.start()
        await clock.sleep(1.0)
        await story(world)

    run_virtual(main, limit_s=100_000.0)


def test_one_that_replays_for_an_hour_is_let_do_so() -> None:
    async def story(world: World) -> None:
        await world.look_for(3600.0, lambda now: {"progress": [int(now) // 250, 0.0]})
        assert world.starts == 1 and not world.role.up
        await world.look_for(20.0, lambda now: {"ready": True, "progress": [99, 0.0]})
        assert world.role.up

    in_world(story)


def test_one_that_gets_no_further_is_killed_and_started_again() -> None:
    async def story(world: World) -> None:
        await world.look_for(LOADING_S - 20.0, lambda now: {"progress": [1, 0.5]})
        assert world.starts == 1
        await world.look_for(60.0, lambda now: {"progress": [1, 0.5]})
        assert world.starts == 2 and world.role.restarts == 1

    in_world(story)


def test_one_that_tells_nothing_is_killed_after_a_while() -> None:
    async def story(world: World) -> None:
        await world.look_for(LOADING_S - 20.0, lambda now: {})
        assert world.starts == 1
        await world.look_for(60.0, lambda now: {})
        assert world.starts == 2

    in_world(story)


def test_nobody_is_late_while_its_job_is_paused() -> None:
    async def story(world: World) -> None:
        document = {
            "algorithm": {"groups_per_step": 1, "group_size": 1, "max_staleness": 1},
            "budget": {"steps": 3},
        }
        await jobs.submit(world.state, "j", document, "", "submit")
        led = await leader.campaign(world.state, PLANNER, "test", 1_000_000)
        why = Why("share", "j")
        await pool.write(world.state, led, "pause", [Admit("j", "paused: another one", why)], None)
        await world.look_for(3 * LOADING_S, lambda now: {"progress": [1, 0.5]})
        assert world.starts == 1
        await pool.write(world.state, led, "go on", [Admit("j", "", why)], None)
        await world.look_for(LOADING_S - 50.0, lambda now: {"progress": [1, 0.5]})
        assert world.starts == 1
        await world.look_for(90.0, lambda now: {"progress": [1, 0.5]})
        assert world.starts == 2

    in_world(story)


def test_its_end_is_news_to_the_worker_at_once() -> None:
    async def story(world: World) -> None:
        await world.look_for(5.0, lambda now: {"ready": True})
        assert world.role.up
        world.news.clear()
        [child] = world.role.supervisor.children.values()
        child.kill()
        async with world.clock.timeout(0.1, "the news"):
            await world.news.wait()
        assert not world.role.up and world.role.doing == Doing.STARTING

    in_world(story)
