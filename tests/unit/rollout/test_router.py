"""Turns on an engine that refuses, stops or goes: a trajectory waits, and fails only in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.api.engine import Sampling, Tokens
from common.errors import ToolFailed
from common.mesh import Mesh
from common.random import Random
from common.simhost import SimulatedHost
from common.state.client import State
from common.transport.memory import MemoryNetwork, MemoryTransport
from common.virtual import VirtualClock, run_virtual
from services.rollout.engine_service import EngineService
from services.rollout.engines.simulated import SimulatedEngine
from services.rollout.link import LENGTH, Turn
from services.rollout.router import PATIENCE_S, Router
from services.rollout.trajectory import Trajectory

SLOTS = 4
NEW = 20  # tokens of a turn
LOOK_S = 0.5


class Forgetful:
    """A token sink for what needs no ledger."""

    async def tokens(self, ids: list[int], counts: list[int], flush: Tokens) -> None:
        return None


class Bench:
    """A router and one simulated engine, under virtual time."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state = State.simulated(clock)
        self.rollout = self._mesh("rollout/0")
        self.router = Router(self.rollout, Forgetful(), Sampling([], []), SLOTS)
        self.engine = EngineService(
            self._mesh("engine/g0"),
            SimulatedEngine(clock, SLOTS, 100.0),
            SLOTS,
            lambda action: action(),
        )

    def _mesh(self, name: str) -> Mesh:
        return Mesh(
            name=name,
            kind=name.partition("/")[0],
            state=self.state,
            transport=MemoryTransport(self.network, f"mem://{name}"),
            clock=self.clock,
            random=self.random.child(name),
            host=SimulatedHost(self.clock, self.random.child("host " + name)),
        )

    async def start(self) -> None:
        await self.engine.mesh.join(self.engine)
        await self.rollout.join(None)
        self.tasks = [asyncio.create_task(self._drive()), asyncio.create_task(self._look())]

    async def _drive(self) -> None:
        while True:
            self.engine.turn()
            await self.clock.sleep(0.02)

    async def _look(self) -> None:
        while True:
            self.router.observe({"engine/g0"})
            await self.clock.sleep(LOOK_S)

    def begin(self, member: int) -> asyncio.Task[Trajectory]:
        return asyncio.create_task(self.generate(member))

    async def generate(self, member: int) -> Trajectory:
        t = Trajectory(0, member, 0, 0, seed=member)
        t.begin([1, 2, 3])
        finish = await self.router.generate(lambda: Turn(t, 3 + NEW - t.length), 0)
        self.router.release(t)
        assert (finish, t.length) == (LENGTH, 3 + NEW)
        return t


def on_bench(story: Callable[[Bench], object]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.start()
        await story(bench)  # type: ignore[misc]

    run_virtual(main, limit_s=3600.0)


def test_an_engine_that_refuses_for_a_while_costs_no_trajectory() -> None:
    async def story(bench: Bench) -> None:
        await bench.generate(0)
        bench.engine.draining = True
        later = asyncio.gather(*(bench.generate(member) for member in range(1, 9)))
        await bench.clock.sleep(PATIENCE_S / 2)
        assert not later.done()
        bench.engine.draining = False
        await later

    on_bench(story)


def test_a_trajectory_that_no_engine_ever_serves_fails_by_type() -> None:
    async def story(bench: Bench) -> None:
        await bench.generate(0)
        bench.engine.draining = True
        began = bench.clock.monotonic()
        with pytest.raises(ToolFailed, match="engines in a row failed trajectory"):
            await bench.generate(1)
        assert bench.clock.monotonic() - began > PATIENCE_S

    on_bench(story)
