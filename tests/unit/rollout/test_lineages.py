"""A shard whose job goes back to a checkpoint: what it evaluated, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshrl.common.base.occupancy import Occupancy
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import (
    BudgetConfig,
    DatasetConfig,
    EvaluationConfig,
    JobConfig,
    RewardConfig,
)
from meshrl.common.state import groups, jobs, steps
from meshrl.services.rollout.job import ShardJob
from meshrl.services.rollout.routing.stay import Stay
from meshrl.services.rollout.runner import TrajectoryRunner
from meshrl.services.rollout.shard import RolloutShard
from meshrl.services.rollout.trajectories.trajectory import Ending, Trajectory
from meshrl.services.rollout.worked import Worked
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, Seats, document
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on

EVERY = 2


class World:
    """A shard's mesh, a job in training, and what stands in for engines: `going` lets trajectories
    of an evaluation end, each with the version that the job has then.
    """

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock = clock
        self.mesh = alone(SHARD, clock, random, SimulatedHost(clock, random.child("host")))
        self.state = self.mesh.state
        self.going = asyncio.Event()
        self.entered: list[int] = []
        self.sessions: list[int] = []
        self.shard = RolloutShard(self.mesh, Path())
        self.job = self._job()

    def _job(self) -> ShardJob:
        async def run(t: Trajectory, row: dict[str, Any]) -> None:
            self.sessions.append(t.id)
            await self.going.wait()
            version = (await jobs.job(self.state, JOB)).version
            t.begin([1, 2])
            ones = np.ones(1, np.int32)
            t.sampled(ones, np.zeros(1, np.float32), version * ones)
            t.ending = Ending("done", 1.0)

        async def look() -> None:
            pass

        job = ShardJob.__new__(ShardJob)
        job.config = JobConfig(
            dataset=DatasetConfig(held_out="held_out.jsonl"),
            reward=RewardConfig(use="m:f"),
            evaluation=EvaluationConfig(every=EVERY),
            budget=BudgetConfig(steps=50),
        )
        job.mesh, job.job = self.mesh, JobData(JOB, job.config, Path(), Path())
        job.held_out = [{"n": 0}]
        job.lineage, job._beginning, job._groups = -1, 0, {}
        router = SimpleNamespace(enter=self.entered.append, stays={})
        job.runner = TrajectoryRunner.__new__(TrajectoryRunner)
        job.runner.worked = Worked(Occupancy(self.mesh.clock.monotonic))
        job.runner.router = router  # type: ignore[assignment]
        job.samples = SimpleNamespace(evaluated=lambda *drawn: None)  # type: ignore[assignment]
        job.runner.run, job.look = run, look  # type: ignore[method-assign]
        return job

    async def begin(self) -> None:
        await self.mesh.join(self.shard)
        trainer = await Bench(self.state, None).seat(TRAINER)
        self.seats = Seats(self.state, self.mesh.token, trainer)
        await jobs.submit(self.state, JOB, document(), "", "op")
        await steps.commit_initial(
            self.state, JOB, TRAINER, trainer, 0, steps.VersionNames("m0", "c0")
        )
        await jobs.set_phase(self.state, JOB, jobs.Phase.TRAINING, trainer, TRAINER)

    async def train(self, *, lineage: int) -> None:
        for group in await self.seats.admit():
            await self.seats.finish(group)
        step = (await jobs.job(self.state, JOB)).version + 1
        await self.seats.commit(step, await self.seats.leased(step), lineage=lineage)

    async def go_back(self, version: int) -> None:
        back = (self.state, JOB, TRAINER, self.seats.trainer)
        await steps.open_lineage(
            *back, version, steps.VersionNames(f"m0.{version}", "c"), f"back to {version}"
        )

    async def turn(self) -> None:
        """One look of the shard at the job, and what comes of it."""
        assert await self.shard._turn(self.job)
        await self.clock.sleep(1.0)

    async def results(self) -> dict[str, dict[str, Any]]:
        return {e["tag"]: e["result"] for e in await jobs.evaluations(self.state, JOB)}


def in_world(story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random)
        await world.begin()
        await story(world)

    run_virtual(main, limit_s=3600.0)


@story_on(in_world)
async def test_a_version_of_a_new_lineage_is_evaluated_though_its_number_was_before(
    world: World,
) -> None:
    world.going.set()
    for _ in range(EVERY):
        await world.train(lineage=0)
    await world.turn()
    assert list(await world.results()) == ["step-2"]
    await world.go_back(1)
    await world.turn()
    assert await world.results() == {}
    await world.train(lineage=1)
    await world.turn()
    assert (await world.results())["step-2"]["figures"] == {"held_out.sampled": 1.0}
    assert len(set(world.sessions)) == 2, "engines keep what they computed of a session"
    assert world.entered == [0, 1]


@story_on(in_world)
async def test_an_evaluation_of_an_abandoned_version_ends_without_a_result(world: World) -> None:
    for _ in range(EVERY):
        await world.train(lineage=0)
    await world.turn()
    assert len(world.sessions) == 1
    await world.go_back(1)
    await world.train(lineage=1)
    await world.turn()
    world.going.set()
    await world.clock.sleep(1.0)
    assert len(world.sessions) == 2, "of each lineage's version 2"
    result = (await world.results())["step-2"]
    assert (result["mixed"], result["figures"]) == (0, {"held_out.sampled": 1.0})
    assert not world.shard._evaluating


@story_on(in_world)
async def test_nobody_waits_for_a_version_that_was_abandoned(world: World) -> None:
    job = world.job
    under_way = Trajectory(0, 0, 0, 15, seed=0)
    router = job.runner.router
    router.stays[under_way.id] = Stay(router, under_way)
    job.enter(0, 15)
    assert under_way.version == 15
    job.enter(1, 8)
    assert under_way.version == 8 and world.entered == [0, 1]

    async def group(number: int, prompt: int, version: int, members: Any) -> None:
        begun.append((number, version))

    begun: list[tuple[int, int]] = []
    job._group = group  # type: ignore[assignment, method-assign]
    job.start(groups.AdmittedGroup(1, 0, 15, lineage=0), [])  # admitted before the news came
    job.start(groups.AdmittedGroup(2, 0, 9, lineage=1), [])
    job.start(groups.AdmittedGroup(3, 0, 9, lineage=2), [])
    await asyncio.gather(*job._groups.values())
    assert begun == [(1, 8), (2, 9), (3, 9)] and world.entered == [0, 1, 2]
