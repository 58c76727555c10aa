"""A role process that starts has all the time that it needs, while it gets on; its end is news."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.random import Random
from common.runtime.mesh import Mesh, MeshSettings
from common.state import registry
from services.node.roleprocess import LOADING_S, RoleProcess
from services.node.roles import Assignment
from sim.host import SimulatedHost
from sim.loop import VirtualClock, run_virtual
from sim.network import MemoryNetwork, MemoryTransport
from sim.state import simulated_state

NAME, HOST, EPOCH = "trainer/j", "here", 3
TRAINING = Assignment("training", "j", core=True, epoch=EPOCH)


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
        self.state = simulated_state(self.clock)
        mesh = Mesh(
            name="worker/g0",
            kind="worker",
            state=self.state,
            transport=MemoryTransport(
                MemoryNetwork(self.clock, self.random.child("network")), "mem://one"
            ),
            clock=self.clock,
            random=self.random,
            host=SimulatedHost(self.clock, self.random.child("host"), {"role": program}),
            settings=MeshSettings(redis_url="simulated", run_root="", host=HOST),
        )
        self.role = RoleProcess(mesh, "g0", {"training": ["python", "-m", "role"]}, Path())

    async def look_for(self, seconds: float, publish: Callable[[float], dict[str, Any]]) -> None:
        """The worker looks each ten seconds at what its process publishes by then."""
        entry = registry.Entry(NAME, "trainer", host=HOST, pid=self.role.pid, incarnation="a")
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until and self.starts == 1:
            stats = {"epoch": EPOCH, "ready": False} | publish(self.clock.monotonic())
            await registry.register(self.state, replace(entry, stats=stats), 60_000)
            await self.role.look()
            await self.clock.sleep(10.0)


def in_world(story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random)
        await world.role.start(TRAINING)
        await clock.sleep(1.0)
        await story(world)

    run_virtual(main, limit_s=100_000.0)


def test_one_that_replays_for_an_hour_is_let_do_so() -> None:
    async def story(world: World) -> None:
        await world.look_for(3600.0, lambda now: {"progress": [int(now) // 250, 0.0]})
        assert world.starts == 1 and world.role.state == "starting"
        await world.look_for(20.0, lambda now: {"ready": True, "progress": [99, 0.0]})
        assert world.role.state == "ready"

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


def test_its_end_is_news_to_the_worker_at_once() -> None:
    async def story(world: World) -> None:
        await world.look_for(5.0, lambda now: {"ready": True})
        assert not world.role.changed.is_set()
        [child] = world.role._supervisor.children.values()
        child.kill()
        async with world.clock.timeout(0.1, "the news"):
            await world.role.changed.wait()
        assert world.role.state == "starting"

    in_world(story)
