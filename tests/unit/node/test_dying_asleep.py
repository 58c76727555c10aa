"""A worker, its processes and its record in virtual time: none starts where it is to be asleep, and
none is left without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.files import kept
from meshrl.common.base.host.settings import kept_file
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import leader
from meshrl.common.state.pool.placing.decisions import Decision, Form, Place, Remove, Why
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.rows import Doing, Resident, Role, Tier
from meshrl.common.state.redis.keys import PLANNER
from meshrl.services.node.worker import parser, serve
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost

WHY = Why("test")
NAME = "trainer/j"
CORE: dict[str, Any] = {"job": "j", "role": Role.TRAINING, "core": True}


class Tensor:
    """The least that can be kept."""

    @property
    def sizes(self) -> dict[str, int]:
        return {"weights": 8}

    def read(self, name: str, start: int, end: int) -> NDArray[np.uint8]:
        return np.arange(start, end, dtype=np.uint8)

    def write(self, name: str, start: int, piece: NDArray[np.uint8]) -> None:
        raise NotImplementedError


class World:
    """One worker, in a gang of its own."""

    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        async def program(arguments: list[str], channel: Any) -> None:
            self.running += 1
            self.starts += 1
            try:
                await clock.sleep(1e9)
            finally:
                self.running -= 1

        self.clock, self.running, self.starts = clock, 0, 0
        host = SimulatedHost(clock, random.child("host"), {"meshrl.services.trainer": program})
        settings = MeshSettings(redis_url="simulated", run_root=str(root), host="here")
        self.mesh = alone("worker/w0", clock, random, host, settings=settings)
        self.state = self.mesh.state
        self.file = kept_file(settings.kept_directory("worker/w0"), NAME)
        self._token = self._written = 0

    async def write(self, *decisions: Decision) -> None:
        if not self._token:
            self._token = await leader.campaign(self.state, PLANNER, "test", 1_000_000)
        self._written += 1
        refused = await pool.write(self.state, self._token, f"d{self._written}", decisions, None)
        assert not refused, refused

    async def place(self, id: str = "g0.0", **about: Any) -> None:
        await self.write(Place("g0", Resident(id, **(CORE | about)), WHY))
        await self.clock.sleep(10.0)

    async def resident(self, id: str = "g0.0") -> Resident:
        found = await pool.gang(self.state, "g0")
        assert found is not None
        return next(one for one in found.residents if one.id == id)

    def keep(self) -> None:
        """What a process that fell asleep on the disk leaves."""
        medium = kept.File(self.file, fresh=True)
        kept.keep(medium, {}, Tensor())
        medium.finished()
        medium.close()


def in_world(root: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random, root)
        options = parser().parse_args(["--worker", "w0", "--orphan-s", "0"])
        worker = asyncio.create_task(serve(world.mesh, options))
        await clock.sleep(1.0)
        await world.write(Form("g0", ("w0",), WHY))
        await story(world)
        worker.cancel()
        await asyncio.wait([worker])

    run_virtual(main)


def test_what_is_whole_waits_for_its_turn_without_a_process(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.place()
        assert world.running == 1
        world.keep()
        await world.place(tier=Tier.DISK, epoch=2)  # it is not up: it was killed as it slept
        assert world.running == 0, "it would compute beside whoever has the accelerator"
        asleep = await world.resident()
        assert asleep.settled and asleep.doing == Doing.READY
        assert asleep.reports[0].tier == Tier.DISK
        assert asleep.reports[0].held.disk == world.file.stat().st_size
        await world.place(epoch=3)
        assert (world.running, world.starts) == (1, 2) and world.file.exists()

    in_world(tmp_path, story)


def test_one_that_kept_nothing_whole_is_as_good_as_asleep(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.place()
        world.file.parent.mkdir(parents=True, exist_ok=True)
        world.file.write_bytes(b"half")
        await world.place(tier=Tier.DISK, epoch=2)
        asleep = await world.resident()
        assert asleep.settled and asleep.doing == Doing.GONE and world.running == 0
        assert asleep.reports[0].tier == Tier.ABSENT
        await world.place(epoch=3)
        assert not (await world.resident()).settled and world.running == 1

    in_world(tmp_path, story)


def test_what_a_dead_sleeper_has_kept_goes_with_its_resident(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.place(tier=Tier.DISK)
        world.keep()
        await world.write(Remove("g0", "g0.0", WHY))
        await world.clock.sleep(10.0)
        assert not world.file.exists() and world.starts == 0

    in_world(tmp_path, story)


def test_of_two_residents_with_one_name_the_second_is_told_as_failed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.place()
        await world.place("g0.1")
        first, second = await world.resident("g0.0"), await world.resident("g0.1")
        assert first.doing == Doing.STARTING and world.starts == 1
        assert second.doing == Doing.FAILED
        assert "trainer/j is that of g0.0" in second.detail and "g0.1" in second.detail
        await world.write(Remove("g0", "g0.0", WHY))
        await world.clock.sleep(10.0)
        assert (await world.resident("g0.1")).doing == Doing.STARTING
        assert (world.running, world.starts) == (1, 2)

    in_world(tmp_path, story)
