"""Planners that read, decide and write: one leads, and its successor continues from its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.interface import Cast, ChangeHint, Interface
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.calls.actor import Actor, cast
from meshrl.common.state import events, jobs
from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    Decision,
    FormGang,
    PlaceInstance,
    Rationale,
    RemoveInstance,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest, PoolSnapshot
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers import rows
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.planner import LEASE_MS, POLL_S, Planner, find_changed_records
from meshrl.sim.mesh.job.job_setup import JOB_NAME
from tests.mesh.simulated.virtual_meshes import BareMesh, BareProcess, run_on_bare_mesh
from tests.stories import story_on

GATHERED_S = PoolSettings().join_grace_s + 10.0
LOST_S = PoolSettings().worker_lost_s
Story = Callable[["PlannerMesh"], Any]


class Worker(Interface):
    """Interface of a worker for the planner."""

    notify_change = Cast(ChangeHint)


class ReadyWorker(Actor):
    """Worker whose instances are ready as soon as it reads of them; it counts change hints."""

    interface = Worker

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.hints, self.reads = mesh, 0, 0
        self._seen = asyncio.Event()

    @cast(Worker.notify_change)
    def notify_change(self, hint: ChangeHint) -> None:
        self.hints += 1
        self._seen.set()

    async def work(self, id: str) -> None:
        state, revision = self.mesh.state, -1
        while True:
            row = await pool.read_worker(state, id)
            if row is not None and row.gang and row.revision != revision:
                revision = row.revision
                self.reads += 1
                gang = await pool.read_gang(state, row.gang)
                for resident in gang.instances if gang is not None else ():
                    assert gang is not None
                    await self._ready(id, row, gang, resident)
            with suppress(DeadlineExceeded):
                async with self.mesh.clock.timeout(1.0, "a hint"):
                    await self._seen.wait()
            self._seen.clear()

    async def _ready(self, id: str, row: rows.WorkerRow, gang: Gang, resident: Instance) -> None:
        rank = gang.workers.index(id)
        if rank not in resident.ranks:
            return
        doing = InstancePhase.READY
        about = rank, resident.generation, resident.epoch, self.mesh.token, doing, resident.tier
        await pool.report_instance(
            self.mesh.state, id, gang.id, resident.id, InstanceReport(*about)
        )


class PlannerMesh:
    """Planners, workers and an agent on one virtual mesh."""

    def __init__(self, world: BareMesh) -> None:
        self.world, self.clock, self.state = world, world.clock, world.state
        self.workers: dict[str, ReadyWorker] = {}

    async def start(self, workers: int = 3) -> None:
        await pool.write_settings(self.state, PoolSettings())
        await jobs.submit(
            self.state, JOB_NAME, JobConfig().to_document(), str(self.world.root), "submit"
        )
        agent = self.world.process("node/here", "node")
        await agent.join(Actor(), dict)
        for n in range(workers):
            await self.worker(f"w{n}")

    async def worker(self, id: str) -> BareProcess:
        process = self.world.process(f"worker/{id}", "worker")
        actor = ReadyWorker(process.mesh)
        await process.join(actor, dict)
        about = rows.WorkerRow(id, "here", "cpu:0", process.mesh.token)
        await pool.join_worker(self.state, about)
        self.workers[id] = actor
        process.run(actor.work(id))
        return process

    async def planner(self, n: int = 0) -> tuple[BareProcess, Planner]:
        process = self.world.process(f"planner/{n}", "planner")
        planner = Planner(process.mesh)
        await process.join(planner, lambda: planner.stats().encode())
        process.run(planner.serve())
        return process, planner

    async def roles(self) -> list[str]:
        for process in self.world.processes:
            process.check()
        known = await pool.read_gangs(self.state)
        return sorted(one.role for gang in known for one in gang.instances)

    async def kinds(self) -> list[str]:
        return [event.kind for event in await events.read_all(self.state)]


def run_planner_mesh(root: Path, story: Story) -> None:
    async def main(world: BareMesh) -> None:
        await story(PlannerMesh(world))

    run_on_bare_mesh(root, main)


@story_on(run_planner_mesh, "tmp_path")
async def test_job_gets_its_workers_and_each_reads_its_gang_on_a_hint(mesh: PlannerMesh) -> None:
    await mesh.start()
    _, planner = await mesh.planner()
    await mesh.clock.sleep(GATHERED_S)
    assert await mesh.roles() == ["rollout", "rollout", "training"]
    assert all(gang.is_reconciled for gang in await pool.read_gangs(mesh.state))
    assert f"rollout/{JOB_NAME}/0" in await pool.read_host_services(mesh.state, "here")
    assert all(actor.hints for actor in mesh.workers.values())
    assert planner.stats().leader and planner.stats().workers == 3
    before = await mesh.kinds()
    await mesh.clock.sleep(60.0)
    assert await mesh.kinds() == before  # a mesh at its desired state decides nothing
    assert all(actor.reads <= 2 for actor in mesh.workers.values())


@story_on(run_planner_mesh, "tmp_path")
async def test_next_leader_continues_with_the_planner_memory(mesh: PlannerMesh) -> None:
    await mesh.start()
    first, _ = await mesh.planner(0)
    await mesh.clock.sleep(GATHERED_S)
    _, following = await mesh.planner(1)
    await pool.submit_request(mesh.state, PoolRequest("put", "move", "w2", "idle", JOB_NAME))
    await mesh.clock.sleep(4 * POLL_S)
    assert len(await mesh.roles()) == 2
    first.stop()
    await mesh.clock.sleep(2 * LEASE_MS / 1000 + 30.0)
    assert following.stats().leader
    assert len(await mesh.roles()) == 2  # w2 is still cordoned, as a user requested
    first.process.resume()
    await mesh.clock.sleep(10.0)
    assert first.process.has_exited and following.stats().leader
    assert (await mesh.kinds()).count("leader") == 2


@story_on(run_planner_mesh, "tmp_path")
async def test_workers_are_not_marked_lost_right_after_an_outage(mesh: PlannerMesh) -> None:
    await mesh.start()
    await mesh.planner()
    await mesh.clock.sleep(GATHERED_S)
    before = await pool.read_gangs(mesh.state)
    mesh.world.redis.is_unreachable = True
    await mesh.clock.sleep(60.0)
    mesh.world.redis.is_unreachable = False
    await mesh.clock.sleep(30.0)
    assert "lost" not in await mesh.kinds()
    assert [g.id for g in await pool.read_gangs(mesh.state)] == [g.id for g in before]


@story_on(run_planner_mesh, "tmp_path")
async def test_job_continues_without_a_lost_worker(mesh: PlannerMesh) -> None:
    await mesh.start()
    await mesh.planner()
    await mesh.clock.sleep(GATHERED_S)
    engine = next(
        gang for gang in await pool.read_gangs(mesh.state) if gang.instances[0].role == Role.ROLLOUT
    )
    [lost_worker] = engine.workers
    next(p for p in mesh.world.processes if p.name == f"worker/{lost_worker}").process.kill()
    await mesh.clock.sleep(LEASE_MS / 1000 + LOST_S + 10.0)
    assert (await mesh.kinds()).count("lost") == 1
    assert await mesh.roles() == ["rollout", "training"]


def test_changes_notify_the_affected_workers_and_hosts() -> None:
    why = Rationale("default")
    known = Gang("g0", ("w0", "w1"), 1, (Instance("g0.0", JOB_NAME, Role.ROLLOUT),))
    resident = Instance("g1.0", JOB_NAME, Role.ROLLOUT)
    decided: list[Decision] = [
        FormGang("g1", ("w2",), why),
        PlaceInstance("g1", resident, why),
        RemoveInstance("g0", "g0.0", why),
        AssignServices("here", (), why),
    ]
    assert find_changed_records(PoolSnapshot(0, gangs=(known,)), decided) == (
        ["w2", "w0", "w1"],
        ["here"],
    )
    assert find_changed_records(PoolSnapshot(0), []) == ([], [])
