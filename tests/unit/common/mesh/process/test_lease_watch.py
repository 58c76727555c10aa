"""A lease watch tells a stopped process from one whose Redis was away, under virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.supervision.lease_watch import GRACE_S, LeaseWatch
from meshrl.common.state import registry
from meshrl.common.state.redis.client import State
from meshrl.common.state.registry import Entry
from meshrl.sim.loop import run_virtual
from meshrl.sim.redis.state import simulated_state
from tests.simulated_host import SimulatedChannel, SimulatedHost

TTL_MS = 6000


async def sleeps(arguments: list[str], channel: SimulatedChannel) -> None:
    await channel.recv()


class AwayAtTimes(State):
    """A simulated Redis that can be away."""

    away = False

    async def run(self, script: str, keys: list[str], *args: object) -> object:
        if self.away:
            raise StateUnavailable("away")
        return await super().run(script, keys, *args)


class Scene:
    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        whole = simulated_state(clock)
        self.state = AwayAtTimes(whole.url, whole.client, whole._sync, clock.monotonic)
        self.host = SimulatedHost(clock, random, {"services.x": sleeps})
        self.child: Child = self.host.spawn(["python", "-m", "services.x"], name="x/0")
        self.watch = LeaseWatch(self.state, clock, "h", lambda: [self.child])
        self.token = 0

    async def register(self, incarnation: str = "i1", pid: int = 0) -> None:
        entry = Entry("x/0", "x", host="h", pid=pid or self.child.pid, incarnation=incarnation)
        self.token = await registry.register(self.state, entry, TTL_MS)

    async def watching(self, seconds: float, *, renewing: bool = False) -> None:
        for _ in range(int(seconds / 0.5)):
            if renewing:
                registry.renew(self.state, "x/0", self.token, TTL_MS, {}, [])
            await self.clock.sleep(0.5)
            await self.watch.look()


def in_scene(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(clock: Clock, random: Random) -> None:
        scene = Scene(clock, random)
        await play(scene)
        scene.child.kill()

    run_virtual(main)


def test_a_process_that_renews_is_left_alone_and_a_stopped_one_is_found() -> None:
    async def play(scene: Scene) -> None:
        await scene.register()
        await scene.watching(20, renewing=True)
        assert not scene.watch.expired(scene.child)
        await scene.watching(7)
        assert not scene.watch.expired(scene.child)
        await scene.watching(3)
        assert scene.watch.expired(scene.child)

    in_scene(play)


def test_a_process_that_has_not_registered_yet_is_no_stopped_one() -> None:
    async def play(scene: Scene) -> None:
        await scene.register(pid=scene.child.pid + 1)  # a predecessor's entry, expired
        await scene.watching(30)
        assert not scene.watch.expired(scene.child)

    in_scene(play)


def test_after_an_outage_of_redis_everyone_has_a_grace() -> None:
    async def play(scene: Scene) -> None:
        await scene.register()
        await scene.watching(3, renewing=True)
        scene.state.away = True
        await scene.watching(20)
        scene.state.away = False
        await scene.watching(GRACE_S - 1)
        assert not scene.watch.expired(scene.child)
        await scene.watching(4)
        assert scene.watch.expired(scene.child)

    in_scene(play)


def test_the_name_of_a_dead_process_is_free_at_once_even_if_redis_was_away() -> None:
    async def play(scene: Scene) -> None:
        await scene.register()
        scene.state.away = True
        await scene.watch.evict(scene.child)
        scene.state.away = False
        await scene.watching(1)
        entry = await registry.lookup(scene.state, "x/0")
        assert entry is not None and not entry.alive

    in_scene(play)


def test_a_late_eviction_spares_the_successor() -> None:
    async def play(scene: Scene) -> None:
        await scene.register()
        await registry.evict(scene.state, "x/0", "i1")
        await scene.register("i2", pid=99)
        await scene.watch.evict(scene.child)
        entry = await registry.lookup(scene.state, "x/0")
        assert entry is not None and entry.alive and entry.incarnation == "i2"

    in_scene(play)
