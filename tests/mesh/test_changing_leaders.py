"""What a planner makes of leadership that it lost, and of what its predecessor left under way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from common.errors import StateUnavailable
from common.job.config import JobConfig
from common.random import Random
from common.state import events, gangs, leader
from common.state.client import State
from common.state.keys import MESH, PLANNER
from services.planner.planner import LEASE_MS
from sim.loop import VirtualClock, run_virtual
from sim.mesh.job import JOB
from sim.state import simulated_as
from tests.mesh.simulated.test_planned_meshes import PlannedMesh

TERM_S = LEASE_MS / 1000


class WatchedState(State):
    """Counts what is read, and lets something happen before or after a script runs."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.unanswered: set[str] = set()
        self.largest = 0  # characters of an answer

    async def run(self, script: str, keys: list[str], *args: Any) -> Any:
        if happens := self.before.pop(script, None):
            await happens()
        answer = await super().run(script, keys, *args)
        if script in self.unanswered:
            self.unanswered.remove(script)
            raise StateUnavailable(f"the answer to {script} was lost")
        return answer

    async def command(self, *words: Any, **limits: Any) -> Any:
        reply = await super().command(*words, **limits)
        self.largest = max(self.largest, len(repr(reply)))
        return reply


class Led(PlannedMesh):
    """A mesh of three workers with a job, whose planner leads."""

    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        super().__init__(clock, random, root)
        self.state = simulated_as(WatchedState, clock)
        self.world.state = self.state

    async def open(self) -> None:
        await self.start(JobConfig())
        for number in range(3):
            await self.worker(f"g{number}")
        await self.clock.sleep(20.0)
        assert await self.roles() == ["training", "rollout", "rollout"]

    async def gang(self, name: str) -> gangs.Gang:
        found = await gangs.gang(self.state, name)
        assert found is not None
        return found

    async def resigned(self) -> None:
        """The planner that leads no longer does."""
        await self.state.command("DEL", f"{MESH}:leader:{PLANNER}")

    async def told(self, kind: str) -> list[dict[str, Any]]:
        return [e.fields for e in await events.read_all(self.state) if e.kind == kind]


def tell(story: Callable[[Led], Awaitable[None]], root: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = Led(clock, random, root)
        await mesh.open()
        await story(mesh)
        await mesh.job()  # raises what a process raised

    run_virtual(main, seed=3, limit_s=3600.0)


def test_a_move_that_another_leader_made_meanwhile_is_not_made_again(tmp_path: Path) -> None:
    async def story(mesh: Led) -> None:
        async def another_leads() -> None:
            """It makes the move, and later moves the gang back."""
            await mesh.resigned()
            token = await leader.campaign(mesh.state, PLANNER, "another", LEASE_MS)
            for role in ("training", "rollout"):
                await gangs.set_desired(
                    mesh.state, token, "g1", role, JOB, False, "user", f"to {role}", pinned=True
                )

        mesh.state.before["desired"] = another_leads
        await gangs.request_move(mesh.state, "g1", "training", "asked")
        await mesh.clock.sleep(2 * TERM_S + 10.0)
        assert (await leader.leader(mesh.state, PLANNER))[0].startswith("planner/0")
        moved = [e["role"] for e in await mesh.told("desired") if e["reason"] == "user"]
        assert moved == ["training", "rollout"]

    tell(story, tmp_path)


def test_a_move_whose_answer_was_lost_is_made_once(tmp_path: Path) -> None:
    async def story(mesh: Led) -> None:
        epoch = (await mesh.gang("g1")).epoch
        mesh.state.unanswered.add("desired")
        await gangs.request_move(mesh.state, "g1", "training", "asked")
        await mesh.clock.sleep(10.0)
        moved = await mesh.gang("g1")
        assert (moved.desired_role, moved.epoch) == ("training", epoch + 1)
        [told] = await mesh.told("move")
        assert (told["gang"], told["from"], told["to"]) == ("g1", "rollout", "training")

    tell(story, tmp_path)


def test_a_move_that_the_leader_had_not_made_yet_is_made_by_the_next(tmp_path: Path) -> None:
    async def story(mesh: Led) -> None:
        mesh.state.before["desired"] = mesh.resigned
        await gangs.request_move(mesh.state, "g1", "training", "asked")
        await mesh.clock.sleep(TERM_S + 10.0)
        moved = [e["role"] for e in await mesh.told("desired") if e["reason"] == "user"]
        assert moved == ["training"]

    tell(story, tmp_path)


def test_a_move_that_is_under_way_is_finished_by_the_next_leader(tmp_path: Path) -> None:
    async def story(mesh: Led) -> None:
        obeying = next(p for p in mesh.world.processes if p.name == "worker/g1").tasks.pop()
        obeying.cancel()  # the worker is slow
        await gangs.request_move(mesh.state, "g1", "training", "asked")
        await mesh.clock.sleep(5.0)
        began = await mesh.told("desired")
        assert not (await mesh.gang("g1")).settled
        await mesh.resigned()
        await mesh.clock.sleep(5.0)
        assert await mesh.told("move") == []
        gang = await mesh.gang("g1")
        token = next(p for p in mesh.world.processes if p.name == "worker/g1").mesh.token
        await gangs.report_actual(mesh.state, "g1", token, gang.epoch, "training", "ready")
        await mesh.clock.sleep(5.0)
        await mesh.resigned()
        await mesh.clock.sleep(5.0)
        [told] = await mesh.told("move")
        assert (told["gang"], told["epoch"], told["policy"]) == ("g1", gang.epoch, "user")
        assert told["finished_ms"] - told["started_ms"] in range(9_000, 16_000)
        assert await mesh.told("desired") == began

    tell(story, tmp_path)


def test_a_leader_reads_as_little_however_much_has_happened(tmp_path: Path) -> None:
    async def story(mesh: Led) -> None:
        async def read_by_the_next() -> int:
            await mesh.resigned()
            mesh.state.largest = 0
            await mesh.clock.sleep(5.0)
            return mesh.state.largest

        young = await read_by_the_next()
        for number in range(3000):
            await events.append(mesh.state, "happened", {"number": number})
        assert await read_by_the_next() < young + 1000

    tell(story, tmp_path)
