"""Shard whose job returns to a checkpoint: evaluations and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import (
    BudgetConfig,
    DatasetConfig,
    EvaluationConfig,
    EvaluationDataset,
    JobConfig,
    RewardConfig,
    RolloutConfig,
)
from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.state import groups, jobs, steps
from meshrl.common.state.redis.client import StateClient
from meshrl.services.rollout.evaluation import EvaluationRun
from meshrl.services.rollout.routing.assignment import Assignment
from meshrl.services.rollout.runner import TrajectoryRunner
from meshrl.services.rollout.sample_writer import SampleWriter
from meshrl.services.rollout.shard import RolloutShard
from meshrl.services.rollout.shard_job import ShardJob
from meshrl.services.rollout.trajectories.trajectory import Trajectory, TrajectoryOutcome
from meshrl.services.rollout.trajectories.transcript import Transcript
from meshrl.services.rollout.work_counters import ShardWorkCounters
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, Seats, document
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on

EVERY = 2


class TrainingJob:
    """Mesh of a shard, a job in training and a stand-in for engines.

    Trajectories of an evaluation end while `released` is set, at the job's version of that time.
    """

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock = clock
        self.mesh = alone(SHARD, clock, random, SimulatedHost(clock, random.child("host")))
        self.state = self.mesh.state
        self.released = asyncio.Event()
        self.entered: list[int] = []
        self.sessions: list[int] = []
        self.shard = RolloutShard(self.mesh, Path())
        self.job = self._job()

    def _job(self) -> ShardJob:
        async def run(t: Trajectory, row: dict[str, Any]) -> None:
            self.sessions.append(t.id)
            await self.released.wait()
            version = (await jobs.read_job(self.state, JOB)).version
            t.set_prompt([1, 2])
            ones = np.ones(1, np.int32)
            t.append_sampled(ones, np.zeros(1, np.float32), version * ones)
            t.outcome = TrajectoryOutcome("done", 1.0)

        async def poll_engines() -> None:
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
        job.lineage, job._lineage_start_version, job._group_tasks = -1, 0, {}
        router = SimpleNamespace(
            enter_lineage=self.entered.append, assignments={}, set_seeding=lambda seed_s: None
        )
        job.runner = TrajectoryRunner.__new__(TrajectoryRunner)
        job.runner.work_counters = ShardWorkCounters(Occupancy(self.mesh.clock.monotonic))
        job.runner.router = router  # type: ignore[assignment]
        job.samples = SimpleNamespace(  # type: ignore[assignment]
            write_evaluation_samples=lambda *samples: None
        )
        job.runner.run, job.poll_engines = run, poll_engines  # type: ignore[assignment, method-assign]
        return job

    async def begin(self) -> None:
        await self.mesh.join(self.shard)
        trainer = await Bench(self.state, None).seat(TRAINER)
        self.seats = Seats(self.state, self.mesh.token, trainer)
        await jobs.submit(self.state, JOB, document(), "", "op")
        await steps.commit_initial(
            self.state, JOB, TRAINER, trainer, 0, steps.VersionReferences("m0", "c0")
        )
        await jobs.set_phase(self.state, JOB, jobs.Phase.TRAINING, trainer, TRAINER)

    async def train(self, *, lineage: int) -> None:
        for group in await self.seats.admit():
            await self.seats.finish(group)
        step = (await jobs.read_job(self.state, JOB)).version + 1
        await self.seats.commit(step, await self.seats.leased(step), lineage=lineage)

    async def go_back(self, version: int) -> None:
        back = (self.state, JOB, TRAINER, self.seats.trainer)
        await steps.open_lineage(
            *back, version, steps.VersionReferences(f"m0.{version}", "c"), f"back to {version}"
        )

    async def poll_shard(self) -> None:
        """Let the shard poll the job once and wait for the effects."""
        assert await self.shard._poll(self.job)
        await self.clock.sleep(1.0)

    async def results(self) -> dict[str, dict[str, Any]]:
        return {e["tag"]: e["result"] for e in await jobs.read_evaluations(self.state, JOB)}


def run_with_training_job(story: Callable[[TrainingJob], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        training_job = TrainingJob(clock, random)
        await training_job.begin()
        await story(training_job)

    run_virtual(main, limit_s=3600.0)


@story_on(run_with_training_job)
async def test_version_of_a_new_lineage_is_evaluated_again(training_job: TrainingJob) -> None:
    training_job.released.set()
    for _ in range(EVERY):
        await training_job.train(lineage=0)
    await training_job.poll_shard()
    assert list(await training_job.results()) == ["step-2"]
    await training_job.go_back(1)
    await training_job.poll_shard()
    assert await training_job.results() == {}
    await training_job.train(lineage=1)
    await training_job.poll_shard()
    assert (await training_job.results())["step-2"]["figures"] == {"held_out.sampled": 1.0}
    assert len(set(training_job.sessions)) == 2, "engines keep what they computed of a session"
    assert training_job.entered == [0, 1]


@story_on(run_with_training_job)
async def test_evaluation_of_an_abandoned_version_has_no_result(training_job: TrainingJob) -> None:
    for _ in range(EVERY):
        await training_job.train(lineage=0)
    await training_job.poll_shard()
    assert len(training_job.sessions) == 1
    await training_job.go_back(1)
    await training_job.train(lineage=1)
    await training_job.poll_shard()
    training_job.released.set()
    await training_job.clock.sleep(1.0)
    assert len(training_job.sessions) == 2, "of each lineage's version 2"
    result = (await training_job.results())["step-2"]
    assert (result["mixed"], result["figures"]) == (0, {"held_out.sampled": 1.0})
    assert not training_job.shard._evaluation_tasks


@story_on(run_with_training_job)
async def test_waits_for_an_abandoned_version_end(training_job: TrainingJob) -> None:
    job = training_job.job
    under_way = Trajectory(0, 0, 0, 15, seed=0)
    router = job.runner.router
    router.assignments[under_way.id] = Assignment(router, under_way)
    job.enter_lineage(0, 15)
    assert under_way.version == 15
    job.enter_lineage(1, 8)
    assert under_way.version == 8 and training_job.entered == [0, 1]

    async def group(number: int, prompt: int, version: int, members: Any) -> None:
        begun.append((number, version))

    begun: list[tuple[int, int]] = []
    job._run_group = group  # type: ignore[assignment, method-assign]
    job.start_group(
        groups.AdmittedGroup(1, 0, 15, lineage=0), []
    )  # admitted before the shard read of it
    job.start_group(groups.AdmittedGroup(2, 0, 9, lineage=1), [])
    job.start_group(groups.AdmittedGroup(3, 0, 9, lineage=2), [])
    await asyncio.gather(*job._group_tasks.values())
    assert begun == [(1, 8), (2, 9), (3, 9)] and training_job.entered == [0, 1, 2]


VERSION, LINEAGE = 4, 1
PLAN = EvaluationPlan("step-4", VERSION, ("sampled", "greedy"))


class RetainedEvaluation(EvaluationRun):
    """Recorder that retains results in place of publishing them."""

    result: dict[str, Any]
    value: float | None
    under_way: set[int]  # trajectories
    limits: dict[float, tuple[float, int]]  # temperature -> top_p and max_tokens

    async def _record(self, result: dict[str, Any], value: float | None) -> None:
        self.result, self.value = result, value


def evaluation(
    tmp_path: Path,
    outcomes: dict[tuple[int, int, float], Any],
    problems: int = 2,
    **held_out: Any,
) -> RetainedEvaluation:
    """Run an evaluation on two held-out problems and a set of `problems` with two samples of each.

    Args:
        outcomes: (reward or None, version) by prompt, member and temperature, an error or an event
            to wait for; otherwise reward 1 at the version.
        held_out: keys of the held-out set's sampling.
    """
    (tmp_path / "more.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(problems + 1)))
    dataset = EvaluationDataset(
        name="more",
        path="more.jsonl",
        problems=problems,
        samples=2,
        temperature=0.5,
        top_p=0.5,
        pass_at=[1, 2],
    )
    config = JobConfig(
        evaluation=EvaluationConfig(problems=2, datasets=[dataset], best="more.pass@1", **held_out),
        rollout=RolloutConfig(top_p=0.9),
        budget=BudgetConfig(steps=9),
    )
    shard = ShardJob.__new__(ShardJob)
    shard.config = config
    shard.job = JobData("calc", config, tmp_path, tmp_path)
    shard.held_out = [{"n": 0}, {"n": 1}, {"n": 2}]
    seen_ids: set[int] = set()
    under_way: set[int] = set()
    limits: dict[float, tuple[float, int]] = {}

    async def run(t: Trajectory, row: dict[str, Any]) -> None:
        assert t.id not in seen_ids and not t.is_recorded and row["n"] == t.prompt
        seen_ids.add(t.id)
        limits[t.temperature] = t.top_p, t.max_tokens
        under_way.add(t.id)
        try:
            outcome = outcomes.get((t.prompt, t.member, t.temperature), (1.0, VERSION))
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, asyncio.Event):
                await outcome.wait()
        finally:
            under_way.discard(t.id)
        reward, version = outcome
        t.set_prompt([1, 2])
        sampled = np.array([3, 4], np.int32)
        t.append_sampled(sampled, np.zeros(2, np.float32), np.array([VERSION, version], np.int32))
        t.outcome = TrajectoryOutcome("done", reward)

    shard.runner = SimpleNamespace(run=run)  # type: ignore[assignment]
    shard.mesh = SimpleNamespace(  # type: ignore[assignment]
        name="rollout/job/0",
        clock=SystemClock(),
        host=SystemHost(),
        telemetry=Telemetry("rollout/job/0"),
    )
    shard.samples = SampleWriter(shard.mesh, shard.job, Transcript(str, (), ()))
    made = RetainedEvaluation(shard, PLAN, LINEAGE)
    made.under_way, made.limits = under_way, limits
    return made


async def test_result_covers_only_samples_of_its_version(tmp_path: Path) -> None:
    made = evaluation(
        tmp_path,
        {
            (0, 0, 1.0): (0.0, VERSION),
            (1, 0, 0.0): (0.0, VERSION + 1),  # greedy, finally by a newer version
            (0, 1, 0.5): (0.0, VERSION),
            (1, 0, 0.5): (None, VERSION),
        },
    )
    await made.run()
    assert made.result["figures"] == pytest.approx(
        {
            "held_out.sampled": 0.5,
            "held_out.greedy": 1.0,
            "more.mean": 2 / 3,
            "more.pass@1": (0.5 + 1.0) / 2,
            "more.pass@2": 1.0,
        }
    )
    assert (made.result["mixed"], made.result["failed"]) == (1, 1)
    assert (made.result["sampled"], made.result["greedy"]) == (0.5, 1.0)
    assert made.result["length_mean"] == 4.0
    shares = made.result["shares"]
    assert (shares["held_out.sampled"], shares["held_out.greedy"]) == (1.0, 0.5)
    assert shares["more.mean"] == shares["more.pass@1"] == 3 / 4
    assert made.result["reasons"] == {"of another version": 1, "failed": 1}


async def test_each_set_is_sampled_by_its_own_parameters(tmp_path: Path) -> None:
    outcomes = {(0, member, 0.7): (float(member == 2), VERSION) for member in range(3)}
    sampling: dict[str, Any] = {
        "samples": 3,
        "temperature": 0.7,
        "max_tokens": 9,
        "pass_at": [1, 3],
    }
    made = evaluation(tmp_path, outcomes, **sampling)
    await made.run()
    assert made.limits == {0.7: (0.9, 9), 0.0: (0.9, 9), 0.5: (0.5, 0)}
    held_out = {k: v for k, v in made.result["figures"].items() if k.startswith("held_out")}
    assert held_out == pytest.approx(
        {
            "held_out.sampled": 4 / 6,
            "held_out.pass@1": 4 / 6,
            "held_out.pass@3": 1.0,
            "held_out.greedy": 1.0,
        }
    )


@pytest.mark.parametrize("lost", [(None, VERSION), (1.0, VERSION + 1)], ids=["failed", "mixed"])
@pytest.mark.parametrize("missing", [0, 2, 3])
async def test_version_is_best_only_with_nearly_all_samples(
    missing: int, lost: tuple[float | None, int], tmp_path: Path
) -> None:
    outcomes: dict[tuple[int, int, float], Any] = {(n, 0, 0.5): lost for n in range(missing)}
    outcomes[0, 0, 1.0] = (None, VERSION)  # a sample of another set
    made = evaluation(tmp_path, outcomes, problems=20)
    await made.run()
    assert made.result["figures"]["more.pass@1"] == 1.0
    assert made.value == (None if missing > 2 else 1.0), "at most 2 of 40 samples are missing"


async def test_error_in_one_trajectory_cancels_the_others(tmp_path: Path) -> None:
    error = DeadlineExceeded("waiting for an engine for a trajectory")
    made = evaluation(tmp_path, {(0, 0, 1.0): asyncio.Event(), (1, 0, 1.0): error})
    with pytest.raises(DeadlineExceeded):
        await made.run()
    assert made.under_way == set()


class UnreachableFor(StateClient):
    """Simulated Redis that is unreachable for one script."""

    script = ""

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        if script == self.script:
            raise StateUnavailable("away")
        return await super().run_script(script, keys, *args)


@story_on(run_with_training_job)
async def test_redis_outage_at_the_result_causes_no_resampling(training_job: TrainingJob) -> None:
    training_job.released.set()
    for _ in range(EVERY):
        await training_job.train(lineage=0)
    state = UnreachableFor(
        training_job.state.url, training_job.state.client, training_job.state._sync_client
    )
    training_job.mesh.state, state.script = state, "record_evaluation"
    await training_job.poll_shard()
    await training_job.clock.sleep(60.0)
    assert await training_job.results() == {}
    state.script = ""
    await training_job.clock.sleep(2.0)
    assert list(await training_job.results()) == ["step-2"]
    assert len(training_job.sessions) == 1


async def test_metric_without_samples_is_left_out(tmp_path: Path) -> None:
    every = {(n, m, 0.5): (None, VERSION) for n in range(2) for m in range(2)}
    made = evaluation(tmp_path, every)
    await made.run()
    assert not [name for name in made.result["figures"] if name.startswith("more.")]
    assert made.result["shares"]["more.mean"] == 0.0, "and is said to be lost"
    assert made.value is None
