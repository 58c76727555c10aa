"""Planners that look, decide and write: one leads, and whoever follows goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.interface import Cast, Interface, Look
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.calls.actor import Actor, cast
from meshrl.common.state import events, jobs
from meshrl.common.state.pool.placing.decisions import Decision, Form, Place, Remove, Serve, Why
from meshrl.common.state.pool.placing.snapshot import PoolRequest, Snapshot
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers import rows
from meshrl.common.state.pool.workers.rows import Doing, Gang, Report, Resident, Role
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.planner import LEASE_MS, LOOK_S, Planner, changed
from meshrl.sim.mesh.job.job import JOB
from tests.mesh.simulated.worlds import Bare, BareWorld, on_bare_world
from tests.stories import story_on

GATHERED_S = PoolSettings().gather_s + 10.0
LOST_S = PoolSettings().lost_s
Story = Callable[["Pool"], Any]


class Worker(Interface):
    """What a worker hears of a planner."""

    look = Cast(Look)


class Obedient(Actor):
    """A worker whose residents are ready as soon as it reads of them; it counts its hints."""

    interface = Worker

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.hints, self.reads = mesh, 0, 0
        self._seen = asyncio.Event()

    @cast(Worker.look)
    def look(self, hint: Look) -> None:
        self.hints += 1
        self._seen.set()

    async def work(self, id: str) -> None:
        state, revision = self.mesh.state, -1
        while True:
            row = await pool.worker_row(state, id)
            if row is not None and row.gang and row.revision != revision:
                revision = row.revision
                self.reads += 1
                gang = await pool.gang(state, row.gang)
                for resident in gang.residents if gang is not None else ():
                    assert gang is not None
                    await self._ready(id, row, gang, resident)
            with suppress(DeadlineExceeded):
                async with self.mesh.clock.timeout(1.0, "a hint"):
                    await self._seen.wait()
            self._seen.clear()

    async def _ready(self, id: str, row: rows.WorkerRow, gang: Gang, resident: Resident) -> None:
        rank = gang.workers.index(id)
        if rank not in resident.ranks:
            return
        doing = Doing.READY
        about = rank, resident.generation, resident.epoch, self.mesh.token, doing, resident.tier
        await pool.report(self.mesh.state, id, gang.id, resident.id, Report(*about))


class Pool:
    """Planners, workers and an agent on one virtual mesh."""

    def __init__(self, world: BareWorld) -> None:
        self.world, self.clock, self.state = world, world.clock, world.state
        self.workers: dict[str, Obedient] = {}

    async def start(self, workers: int = 3) -> None:
        await pool.write_settings(self.state, PoolSettings())
        await jobs.submit(self.state, JOB, JobConfig().document(), str(self.world.root), "submit")
        agent = self.world.process("node/here", "node")
        await agent.join(Actor(), dict)
        for n in range(workers):
            await self.worker(f"w{n}")

    async def worker(self, id: str) -> Bare:
        process = self.world.process(f"worker/{id}", "worker")
        actor = Obedient(process.mesh)
        await process.join(actor, dict)
        about = rows.WorkerRow(id, "here", "cpu:0", process.mesh.token)
        await pool.join_worker(self.state, about)
        self.workers[id] = actor
        process.run(actor.work(id))
        return process

    async def planner(self, n: int = 0) -> tuple[Bare, Planner]:
        process = self.world.process(f"planner/{n}", "planner")
        planner = Planner(process.mesh)
        await process.join(planner, lambda: planner.stats().encoded())
        process.run(planner.serve())
        return process, planner

    async def roles(self) -> list[str]:
        for process in self.world.processes:
            process.check()
        known = await pool.gangs(self.state)
        return sorted(one.role for gang in known for one in gang.residents)

    async def kinds(self) -> list[str]:
        return [event.kind for event in await events.read_all(self.state)]


def tell(root: Path, story: Story) -> None:
    async def told(world: BareWorld) -> None:
        await story(Pool(world))

    on_bare_world(root, told)


@story_on(tell, "tmp_path")
async def test_a_job_gets_its_workers_and_each_reads_its_gang_when_it_is_told(mesh: Pool) -> None:
    await mesh.start()
    _, planner = await mesh.planner()
    await mesh.clock.sleep(GATHERED_S)
    assert await mesh.roles() == ["rollout", "rollout", "training"]
    assert all(gang.settled for gang in await pool.gangs(mesh.state))
    assert f"rollout/{JOB}/0" in await pool.services_of(mesh.state, "here")
    assert all(actor.hints for actor in mesh.workers.values())
    assert planner.stats().leader and planner.stats().workers == 3
    before = await mesh.kinds()
    await mesh.clock.sleep(60.0)
    assert await mesh.kinds() == before  # a mesh that has settled decides nothing
    assert all(actor.reads <= 2 for actor in mesh.workers.values())


@story_on(tell, "tmp_path")
async def test_whoever_leads_next_goes_on_with_what_was_remembered(mesh: Pool) -> None:
    await mesh.start()
    first, _ = await mesh.planner(0)
    await mesh.clock.sleep(GATHERED_S)
    _, following = await mesh.planner(1)
    await pool.request(mesh.state, PoolRequest("put", "move", "w2", "idle", JOB))
    await mesh.clock.sleep(4 * LOOK_S)
    assert len(await mesh.roles()) == 2
    first.stop()
    await mesh.clock.sleep(2 * LEASE_MS / 1000 + 30.0)
    assert following.stats().leader
    assert len(await mesh.roles()) == 2  # w2 is still put aside, as a person asked
    first.process.resume()
    await mesh.clock.sleep(10.0)
    assert first.process.ended and following.stats().leader
    assert (await mesh.kinds()).count("leader") == 2


@story_on(tell, "tmp_path")
async def test_workers_that_only_seem_to_be_gone_after_an_outage_are_not_lost(mesh: Pool) -> None:
    await mesh.start()
    await mesh.planner()
    await mesh.clock.sleep(GATHERED_S)
    before = await pool.gangs(mesh.state)
    mesh.world.redis.away = True
    await mesh.clock.sleep(60.0)
    mesh.world.redis.away = False
    await mesh.clock.sleep(30.0)
    assert "lost" not in await mesh.kinds()
    assert [g.id for g in await pool.gangs(mesh.state)] == [g.id for g in before]


@story_on(tell, "tmp_path")
async def test_a_worker_that_is_gone_is_lost_and_its_job_goes_on_without_it(mesh: Pool) -> None:
    await mesh.start()
    await mesh.planner()
    await mesh.clock.sleep(GATHERED_S)
    engine = next(
        gang for gang in await pool.gangs(mesh.state) if gang.residents[0].role == Role.ROLLOUT
    )
    [gone] = engine.workers
    next(p for p in mesh.world.processes if p.name == f"worker/{gone}").process.kill()
    await mesh.clock.sleep(LEASE_MS / 1000 + LOST_S + 10.0)
    assert (await mesh.kinds()).count("lost") == 1
    assert await mesh.roles() == ["rollout", "training"]


def test_changes_are_told_to_the_workers_and_hosts_that_they_concern() -> None:
    why = Why("default")
    known = Gang("g0", ("w0", "w1"), 1, (Resident("g0.0", JOB, Role.ROLLOUT),))
    resident = Resident("g1.0", JOB, Role.ROLLOUT)
    decided: list[Decision] = [
        Form("g1", ("w2",), why),
        Place("g1", resident, why),
        Remove("g0", "g0.0", why),
        Serve("here", (), why),
    ]
    assert changed(Snapshot(0, gangs=(known,)), decided) == (["w2", "w0", "w1"], ["here"])
    assert changed(Snapshot(0), []) == ([], [])
