"""Planner decisions on a mesh that is too small for its job, and on stage times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import (
    FrozenModelConfig,
    JobConfig,
    ModelsConfig,
    PlannerConfig,
    PoolConfig,
    RolloutConfig,
    TrainingConfig,
)
from meshrl.common.mesh.runtime.calls.actor import Actor
from meshrl.common.state import jobs
from meshrl.common.state.pool.demand.measurements import MeasuredWork, encode_work
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers import process_names
from meshrl.common.state.pool.workers.rows import (
    Instance,
    InstancePhase,
    InstanceReport,
    Tier,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.planner import POLL_S, Planner
from meshrl.sim.mesh.job.job_setup import JOB_NAME
from tests.mesh.simulated.virtual_meshes import BareMesh, BareProcess, run_on_bare_mesh
from tests.stories import story_on

HOST = "one"
SETTINGS = PoolSettings()
SHORT_S, GONE_S, LOST_S = SETTINGS.shortage_grace_s, SETTINGS.forget_after_s, SETTINGS.worker_lost_s
FROZEN = ModelsConfig(reference=FrozenModelConfig(path="initial"))
NEVER = PoolConfig(colocate="never")
Story = Callable[["PlannedMesh"], Any]


class PlannedMesh:
    """Planner and job whose workers reach their desired state at once."""

    def __init__(self, world: BareMesh) -> None:
        self.world, self.clock = world, world.clock

    async def start(self, config: JobConfig) -> None:
        state, root = self.world.state, str(self.world.root)
        await jobs.submit(state, JOB_NAME, config.to_document(), root, "submit")
        process = self.world.process("planner/0", "planner")
        planner = Planner(process.mesh)
        await process.join(planner, lambda: planner.stats().encode())
        process.run(planner.serve())

    async def worker(self, id: str) -> BareProcess:
        process = self.world.process(process_names.worker_name(id), "worker")
        await process.join(Actor(), dict)
        state, mesh = self.world.state, process.mesh
        await pool.join_worker(state, WorkerRow(id, HOST, "simulated", mesh.token))

        async def follow_desired_state() -> None:
            while True:
                await self.clock.sleep(1.0)
                row = await pool.read_worker(state, id)
                gang = (
                    await pool.read_gang(state, row.gang) if row is not None and row.gang else None
                )
                for resident in gang.instances if gang is not None else ():
                    assert gang is not None
                    rank = gang.workers.index(id)
                    if rank in resident.ranks and not resident.is_reconciled:
                        await pool.report_instance(
                            state,
                            id,
                            gang.id,
                            resident.id,
                            make_ready_report(resident, rank, mesh.token),
                        )

        process.run(follow_desired_state())
        return process

    async def member(self, kind: str, stats: Callable[[], dict[str, Any]]) -> BareProcess:
        """Start a process whose counters the planner reads."""
        process = self.world.process(f"{kind}/0", kind)
        await process.join(Actor(), lambda: {"job": JOB_NAME, **stats()})
        return process

    async def job(self) -> jobs.JobRow:
        row = await jobs.read_job(self.world.state, JOB_NAME)
        assert row is not None
        for process in self.world.processes:
            process.check()
        return row

    async def roles(self) -> list[str]:
        """Return the role of each worker, by its number."""
        found = dict.fromkeys((w.id for w in await pool.read_workers(self.world.state)), "idle")
        for gang in await pool.read_gangs(self.world.state):
            for resident in gang.instances:
                for rank in resident.ranks:
                    found[gang.workers[rank]] = resident.role
        return list(found.values())


def make_ready_report(resident: Instance, rank: int, token: int) -> InstanceReport:
    """Return the report of a worker that has reached its desired state."""
    doing = InstancePhase.GONE if resident.tier == Tier.ABSENT else InstancePhase.READY
    return InstanceReport(rank, resident.generation, resident.epoch, token, doing, resident.tier)


def run_planned_mesh(root: Path, story: Story) -> None:
    async def main(world: BareMesh) -> None:
        await story(PlannedMesh(world))

    run_on_bare_mesh(root, main)


@pytest.mark.parametrize(
    ("config", "workers", "fix"),
    [
        (JobConfig(models=FROZEN, pool=NEVER), 2, "--workers 3`"),
        (JobConfig(training=TrainingConfig(ranks=3)), 2, "--workers 3`"),
        (JobConfig(models=FROZEN, training=TrainingConfig(ranks=2)), 1, "--workers 2`"),
    ],
)
@story_on(run_planned_mesh, "tmp_path")
async def test_job_that_needs_more_workers_fails_with_their_number(
    mesh: PlannedMesh, config: JobConfig, workers: int, fix: str
) -> None:
    for number in range(workers):
        await mesh.worker(f"w{number}")
    await mesh.start(config)
    await mesh.clock.sleep(SHORT_S + 10.0)
    row = await mesh.job()
    assert row.phase == "failed" and fix in row.error


@story_on(run_planned_mesh, "tmp_path")
async def test_job_waits_for_late_workers(mesh: PlannedMesh) -> None:
    await mesh.start(JobConfig(models=FROZEN))
    for number in range(3):
        await mesh.worker(f"w{number}")
        await mesh.clock.sleep(SHORT_S / 3)
    await mesh.clock.sleep(60.0)
    assert (await mesh.job()).phase == "queued"
    assert sorted(await mesh.roles()) == ["rollout", "scoring", "training"]


@story_on(run_planned_mesh, "tmp_path")
async def test_job_with_a_lost_only_engine_continues_in_time_slices(mesh: PlannedMesh) -> None:
    await mesh.start(JobConfig())
    await mesh.worker("w0")
    last = await mesh.worker("w1")
    await mesh.clock.sleep(20.0)
    assert await mesh.roles() == ["training", "rollout"]
    last.stop()
    await mesh.clock.sleep(2 * LOST_S)
    assert (await mesh.job()).phase == "queued"
    [gang] = [g for g in await pool.read_gangs(mesh.world.state) if "w0" in g.workers]
    assert sorted(r.role for r in gang.instances) == ["rollout", "training"]
    assert all(r.time_sliced for r in gang.instances)


@story_on(run_planned_mesh, "tmp_path")
async def test_engine_with_a_lost_worker_is_formed_with_another(
    mesh: PlannedMesh,
) -> None:
    config = JobConfig(rollout=RolloutConfig(tensor_parallel=[2], emulate="18/32/6000"))

    async def engine(mesh: PlannedMesh) -> tuple[str, ...]:
        [gang] = [gang for gang in await pool.read_gangs(mesh.world.state) if len(gang.workers) > 1]
        [resident] = gang.instances
        assert (resident.role, resident.ranks, resident.is_reconciled) == ("rollout", (0, 1), True)
        return gang.workers

    await mesh.start(config)
    members = [await mesh.worker(f"w{number}") for number in range(4)]
    await mesh.clock.sleep(20.0)
    assert await mesh.roles() == ["training", "rollout", "rollout", "training"]
    assert await engine(mesh) == ("w1", "w2")
    members[2].stop()
    await mesh.clock.sleep(2 * LOST_S)
    assert await engine(mesh) == ("w1", "w3"), "the helper makes room"


@story_on(run_planned_mesh, "tmp_path")
async def test_lost_worker_is_waited_for_until_its_timeout(mesh: PlannedMesh) -> None:
    await mesh.start(JobConfig(pool=NEVER))
    await mesh.worker("w0")
    last = await mesh.worker("w1")
    await mesh.clock.sleep(20.0)
    last.stop()
    await mesh.clock.sleep(GONE_S - LOST_S)
    assert (await mesh.job()).phase == "queued"
    await mesh.clock.sleep(2 * LOST_S + SHORT_S + 20.0)
    row = await mesh.job()
    assert row.phase == "failed"
    assert "this mesh has 1" in row.error and "meshrl resume" in row.error


@pytest.mark.rotating(2)
@story_on(run_planned_mesh, "tmp_path")
async def test_stage_times_are_read_once_per_interval(mesh: PlannedMesh) -> None:
    """Check the interval between two reads of stage times. The trainer needs a second for a step,
    and its engines are nearly idle: rollout has a gang too many, as soon as a window shows so.
    """
    interval_s = 120.0
    config = JobConfig(planner=PlannerConfig(interval_s=interval_s, warmup_steps=-1))

    now = mesh.clock.monotonic
    await mesh.start(config)
    for number in range(3):
        await mesh.worker(f"w{number}")
    await mesh.clock.sleep(20.0)
    assert await mesh.roles() == ["training", "rollout", "rollout"]
    groups, size = config.algorithm.groups_per_step, config.algorithm.group_size

    def publish_rollout() -> dict[str, Any]:
        finished_count = now() * groups * size
        work = MeasuredWork(
            groups=now() * groups, trajectories=finished_count, sampled=20 * finished_count
        )
        return {"work": encode_work(work + MeasuredWork(engine_s=4 * now(), flight_s=4 * now()))}

    def publish_training() -> dict[str, Any]:
        steps = int(now())
        return {"work": encode_work(MeasuredWork(steps=steps, busy_s=steps, work_s=0.9 * steps))}

    await mesh.member("rollout", publish_rollout)
    trainer = await mesh.member("trainer", publish_training)
    lease = (JOB_NAME, jobs.Phase.TRAINING, trainer.mesh.token, trainer.mesh.name)
    await jobs.set_phase(mesh.world.state, *lease)
    await mesh.clock.sleep(2 * interval_s - 20.0)
    assert await mesh.roles() == ["training", "rollout", "rollout"]
    await mesh.clock.sleep(interval_s)
    assert sorted(await mesh.roles()) == ["rollout", "training", "training"]


@story_on(run_planned_mesh, "tmp_path")
async def test_all_workers_are_assigned_in_one_snapshot(mesh: PlannedMesh) -> None:
    for number in range(4):
        await mesh.worker(f"w{number}")
    await mesh.start(JobConfig())
    while not any(role != "idle" for role in await mesh.roles()):
        await mesh.clock.sleep(0.01)
    await mesh.clock.sleep(POLL_S / 2)
    assert await mesh.roles() == ["training", "rollout", "rollout", "rollout"]
