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
from tests.mesh.simulated.test_planned_meshes import PlannedMesh, make_ready_report
from tests.mesh.simulated.virtual_meshes import BareMesh, run_on_bare_mesh
from tests.stories import story_on

TERM_S = LEASE_MS / 1000


class WatchedState(StateClient):
    """State client that counts reads and calls a hook before or after a script."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.unanswered: set[str] = set()
        self.largest = 0  # characters of an answer

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        if hook := self.before.pop(script, None):
            await hook()
        answer = await super().run_script(script, keys, *args)
        if script in self.unanswered:
            self.unanswered.remove(script)
            raise StateUnavailable(f"the answer to {script} was lost")
        return answer

    async def run_command(self, *words: Any, **limits: Any) -> Any:
        reply = await super().run_command(*words, **limits)
        self.largest = max(self.largest, len(repr(reply)))
        return reply


class LeaderMesh(PlannedMesh):
    """Mesh of three workers with a job, whose planner leads."""

    def __init__(self, world: BareMesh) -> None:
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

    async def request_move(self, worker: str, role: str) -> None:
        """Request a move as a user."""
        await pool.submit_request(
            self.state, PoolRequest("asked", "move", worker=worker, role=role)
        )

    async def depose_leader(self) -> None:
        """Take the leadership from the planner that has it."""
        await self.state.run_command("DEL", f"{MESH_PREFIX}:leader:{PLANNER_ELECTION}")

    async def read_decisions(self, kind: str) -> list[dict[str, Any]]:
        return [e.fields for e in await events.read_all(self.state) if e.kind == kind]


def run_leader_mesh(root: Path, story: Callable[[LeaderMesh], Awaitable[None]]) -> None:
    async def main(world: BareMesh) -> None:
        mesh = LeaderMesh(world)
        await mesh.open()
        await story(mesh)
        await mesh.job()  # raises the error of a process

    run_on_bare_mesh(root, main)


@story_on(run_leader_mesh, "tmp_path")
async def test_move_by_another_leader_is_not_repeated(mesh: LeaderMesh) -> None:
    async def move_as_another_leader() -> None:
        """Let another leader make the move, and later move the worker back."""
        await mesh.depose_leader()
        token = await leader.campaign(mesh.state, PLANNER_ELECTION, "another", LEASE_MS)
        gang = await mesh.gang_of("w1")
        [engine] = gang.instances
        for number, role in enumerate((Role.TRAINING, Role.ROLLOUT), 1):
            moved = replace(engine, id=f"{gang.id}.{number}", role=role, pinned=True)
            removal = RemoveInstance(gang.id, f"{gang.id}.{number - 1}", Rationale("user"))
            made: list[Decision] = [
                removal,
                PlaceInstance(gang.id, moved, Rationale("user"), request_id="asked"),
            ]
            await pool.write_decisions(mesh.state, token, f"to {role}", made, None)

    mesh.state.before["write_decisions"] = move_as_another_leader
    await mesh.request_move("w1", "training")
    await mesh.clock.sleep(2 * TERM_S + 10.0)
    assert (await leader.read_leader(mesh.state, PLANNER_ELECTION))[0].startswith("planner/0")
    assert await list_decided_roles(mesh) == ["training", "rollout"]


@story_on(run_leader_mesh, "tmp_path")
async def test_move_with_a_lost_answer_is_made_once(mesh: LeaderMesh) -> None:
    mesh.state.unanswered.add("write_decisions")
    await mesh.request_move("w1", "training")
    await mesh.clock.sleep(10.0)
    [resident] = (await mesh.gang_of("w1")).instances
    assert resident.role == Role.TRAINING and not resident.core
    assert await list_decided_roles(mesh) == ["training"]
    [read_decisions] = await mesh.read_decisions("move")
    assert (read_decisions["resident"], read_decisions["from"], read_decisions["to"]) == (
        resident.id,
        "rollout",
        "training",
    )


@story_on(run_leader_mesh, "tmp_path")
async def test_pending_move_is_made_by_the_next_leader(mesh: LeaderMesh) -> None:
    mesh.state.before["write_decisions"] = mesh.depose_leader
    await mesh.request_move("w1", "training")
    await mesh.clock.sleep(TERM_S + 10.0)
    assert await list_decided_roles(mesh) == ["training"]


@story_on(run_leader_mesh, "tmp_path")
async def test_unfinished_move_is_completed_by_the_next_leader(mesh: LeaderMesh) -> None:
    slow = next(p for p in mesh.world.processes if p.name == "worker/w1")
    slow.tasks.pop().cancel()
    await mesh.request_move("w1", "training")
    await mesh.clock.sleep(5.0)
    began = await mesh.read_decisions("desired")
    gang = await mesh.gang_of("w1")
    [resident] = gang.instances
    assert not resident.is_reconciled
    await mesh.depose_leader()
    await mesh.clock.sleep(5.0)
    assert await mesh.read_decisions("move") == []
    report = make_ready_report(resident, 0, slow.mesh.token)
    await pool.report_instance(mesh.state, "w1", gang.id, resident.id, report)
    await mesh.clock.sleep(5.0)
    await mesh.depose_leader()
    await mesh.clock.sleep(5.0)
    [read_decisions] = await mesh.read_decisions("move")
    assert (read_decisions["gang"], read_decisions["resident"]) == (gang.id, resident.id)
    assert read_decisions["finished_ms"] - read_decisions["started_ms"] in range(9_000, 16_000)
    assert await mesh.read_decisions("desired") == began


async def list_decided_roles(mesh: LeaderMesh) -> list[str]:
    """Return the roles of the user's moves that were decided, in their order."""
    read_decisions = await mesh.read_decisions("desired")
    return [e["role"] for e in read_decisions if e["reason"] == "user" and e["role"] != Role.IDLE]


@story_on(run_leader_mesh, "tmp_path")
async def test_leader_reads_do_not_grow_with_history(mesh: LeaderMesh) -> None:
    async def measure_next_leaders_reads() -> int:
        await mesh.depose_leader()
        mesh.state.largest = 0
        await mesh.clock.sleep(5.0)
        return mesh.state.largest

    young = await measure_next_leaders_reads()
    for number in range(3000):
        await events.append(mesh.state, "happened", {"number": number})
    assert await measure_next_leaders_reads() < young + 1000
