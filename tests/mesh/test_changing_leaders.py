"""Planners that lose their leadership, and the unfinished moves of their predecessors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.job.config import JobConfig
from meshrl.common.state import events, leader
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    PlaceInstance,
    Rationale,
    RemoveInstance,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Gang, Role
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, PLANNER_ELECTION
from meshrl.services.planner.planner import LEASE_MS
from meshrl.sim.redis.simulated_state import open_state_on
from tests.mesh.simulated.test_planned_meshes import PlannedMesh, done
from tests.mesh.simulated.worlds import BareWorld, on_bare_world
from tests.stories import story_on

TERM_S = LEASE_MS / 1000


class WatchedState(StateClient):
    """Counts what is read, and lets something happen before or after a script runs."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.unanswered: set[str] = set()
        self.largest = 0  # characters of an answer

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        if happens := self.before.pop(script, None):
            await happens()
        answer = await super().run_script(script, keys, *args)
        if script in self.unanswered:
            self.unanswered.remove(script)
            raise StateUnavailable(f"the answer to {script} was lost")
        return answer

    async def run_command(self, *words: Any, **limits: Any) -> Any:
        reply = await super().run_command(*words, **limits)
        self.largest = max(self.largest, len(repr(reply)))
        return reply


class Led(PlannedMesh):
    """Mesh of three workers with a job, whose planner leads."""

    def __init__(self, world: BareWorld) -> None:
        super().__init__(world)
        self.state = open_state_on(world.redis.server, WatchedState, world.clock)
        world.state = self.state
        world.around.open_state = lambda process: self.state

    async def open(self) -> None:
        await self.start(JobConfig())
        for number in range(3):
            await self.worker(f"w{number}")
        await self.clock.sleep(20.0)
        assert await self.roles() == ["training", "rollout", "rollout"]

    async def gang_of(self, worker: str) -> Gang:
        row = await pool.read_worker(self.state, worker)
        assert row is not None
        found = await pool.read_gang(self.state, row.gang)
        assert found is not None
        return found

    async def asks(self, worker: str, role: str) -> None:
        """Request a move as a user."""
        await pool.submit_request(
            self.state, PoolRequest("asked", "move", worker=worker, role=role)
        )

    async def resigned(self) -> None:
        """Take the leadership from the planner that has it."""
        await self.state.run_command("DEL", f"{MESH_PREFIX}:leader:{PLANNER_ELECTION}")

    async def told(self, kind: str) -> list[dict[str, Any]]:
        return [e.fields for e in await events.read_all(self.state) if e.kind == kind]


def tell(root: Path, story: Callable[[Led], Awaitable[None]]) -> None:
    async def main(world: BareWorld) -> None:
        mesh = Led(world)
        await mesh.open()
        await story(mesh)
        await mesh.job()  # raises what a process raised

    on_bare_world(root, main)


@story_on(tell, "tmp_path")
async def test_a_move_that_another_leader_made_meanwhile_is_not_made_again(mesh: Led) -> None:
    async def another_leads() -> None:
        """Let another leader make the move, and later move the worker back."""
        await mesh.resigned()
        token = await leader.campaign(mesh.state, PLANNER_ELECTION, "another", LEASE_MS)
        gang = await mesh.gang_of("w1")
        [engine] = gang.instances
        for number, role in enumerate((Role.TRAINING, Role.ROLLOUT), 1):
            moved = replace(engine, id=f"{gang.id}.{number}", role=role, pinned=True)
            left = RemoveInstance(gang.id, f"{gang.id}.{number - 1}", Rationale("user"))
            made: list[Decision] = [
                left,
                PlaceInstance(gang.id, moved, Rationale("user"), request_id="asked"),
            ]
            await pool.write_decisions(mesh.state, token, f"to {role}", made, None)

    mesh.state.before["write"] = another_leads
    await mesh.asks("w1", "training")
    await mesh.clock.sleep(2 * TERM_S + 10.0)
    assert (await leader.read_leader(mesh.state, PLANNER_ELECTION))[0].startswith("planner/0")
    assert await moved_to(mesh) == ["training", "rollout"]


@story_on(tell, "tmp_path")
async def test_a_move_whose_answer_was_lost_is_made_once(mesh: Led) -> None:
    mesh.state.unanswered.add("write")
    await mesh.asks("w1", "training")
    await mesh.clock.sleep(10.0)
    [resident] = (await mesh.gang_of("w1")).instances
    assert resident.role == Role.TRAINING and not resident.core
    assert await moved_to(mesh) == ["training"]
    [told] = await mesh.told("move")
    assert (told["resident"], told["from"], told["to"]) == (resident.id, "rollout", "training")


@story_on(tell, "tmp_path")
async def test_a_move_that_the_leader_had_not_made_yet_is_made_by_the_next(mesh: Led) -> None:
    mesh.state.before["write"] = mesh.resigned
    await mesh.asks("w1", "training")
    await mesh.clock.sleep(TERM_S + 10.0)
    assert await moved_to(mesh) == ["training"]


@story_on(tell, "tmp_path")
async def test_a_move_that_is_under_way_is_finished_by_the_next_leader(mesh: Led) -> None:
    slow = next(p for p in mesh.world.processes if p.name == "worker/w1")
    slow.tasks.pop().cancel()
    await mesh.asks("w1", "training")
    await mesh.clock.sleep(5.0)
    began = await mesh.told("desired")
    gang = await mesh.gang_of("w1")
    [resident] = gang.instances
    assert not resident.is_reconciled
    await mesh.resigned()
    await mesh.clock.sleep(5.0)
    assert await mesh.told("move") == []
    report = done(resident, 0, slow.mesh.token)
    await pool.report_instance(mesh.state, "w1", gang.id, resident.id, report)
    await mesh.clock.sleep(5.0)
    await mesh.resigned()
    await mesh.clock.sleep(5.0)
    [told] = await mesh.told("move")
    assert (told["gang"], told["resident"]) == (gang.id, resident.id)
    assert told["finished_ms"] - told["started_ms"] in range(9_000, 16_000)
    assert await mesh.told("desired") == began


async def moved_to(mesh: Led) -> list[str]:
    """Return the roles of the user's moves that were decided, in their order."""
    told = await mesh.told("desired")
    return [e["role"] for e in told if e["reason"] == "user" and e["role"] != Role.IDLE]


@story_on(tell, "tmp_path")
async def test_a_leader_reads_as_little_however_much_has_happened(mesh: Led) -> None:
    async def read_by_the_next() -> int:
        await mesh.resigned()
        mesh.state.largest = 0
        await mesh.clock.sleep(5.0)
        return mesh.state.largest

    young = await read_by_the_next()
    for number in range(3000):
        await events.append(mesh.state, "happened", {"number": number})
    assert await read_by_the_next() < young + 1000
