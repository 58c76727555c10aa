"""Lifetime of a shard: it starts with its job, ends with it and leaks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from meshrl.common.base.random import Random
from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events, groups, jobs, registry
from meshrl.common.state.job_lifecycle.deletion import delete_job
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.process_names import shard_name
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import job_prefix
from meshrl.services.rollout.__main__ import serve
from meshrl.services.rollout.evaluation import evaluate
from meshrl.services.rollout.rewards.sandbox_client import UNAVAILABLE_TIMEOUT_S
from meshrl.services.rollout.shard import RolloutShard
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.contract.state.state_bench import JOB, TRAINER, Bench, document
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ENGINES, ShardBench, run_on_shard

FAILING = 80  # jobs
FIRST = 30  # after so many jobs, everything that is made once has been made
FORGOTTEN_S = 700.0  # the registry knows the dead for ten minutes


class ShardProcesses:
    """Redis and the shards of any job."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random, self.state = clock, random, open_simulated_state(clock)

    def mesh(self, job: str) -> Mesh:
        host = SimulatedHost(self.clock, self.random.child("host"))
        return alone(shard_name(job, 0), self.clock, self.random.child(job), host, state=self.state)

    def served(self, job: str) -> asyncio.Task[None]:
        """Run a shard process; the task ends with the process."""
        return asyncio.create_task(serve(self.mesh(job)))


def run_with_processes(story: Callable[[ShardProcesses], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(ShardProcesses(clock, random))

    run_virtual(main)


async def submit(state: StateClient, job: str) -> None:
    """Submit a job document with an unknown key."""
    raw_document = document() | {"bundle": {"dir": ""}, "renamed": 1}
    await jobs.submit(state, job, raw_document, "", f"submit-{job}")


@story_on(run_with_processes)
async def test_shard_waits_for_its_job_and_ends_if_that_never_starts(place: ShardProcesses) -> None:
    await submit(place.state, "patient")
    shard_process = place.served("patient")
    await place.clock.sleep(300.0)
    assert not shard_process.done(), "the job is queued"
    await jobs.cancel(place.state, "patient", "cancel")
    await place.clock.sleep(5.0)
    assert shard_process.done() and shard_process.result() is None


@story_on(run_with_processes)
async def test_shard_of_a_deleted_job_ends(place: ShardProcesses) -> None:
    await submit(place.state, "gone")
    shard_process = place.served("gone")
    await place.clock.sleep(10.0)
    await jobs.cancel(place.state, "gone", "cancel")
    await delete_job(place.state, "gone", "delete")
    await place.clock.sleep(5.0)
    assert shard_process.done() and shard_process.result() is None


@story_on(run_on_shard, "tmp_path")
async def test_shard_releases_everything_after_its_job(bench: ShardBench, tmp_path: Path) -> None:
    await bench.job.close()
    shard = RolloutShard(bench.mesh, tmp_path)
    shard_process = asyncio.create_task(shard.serve())
    await bench.clock.sleep(1.0)
    assert shard.shard_job is not None and shard.stats()["job"] == JOB
    ledger, tasks = shard.shard_job.runner.ledger, shard._background_tasks
    trainer = await Bench(bench.state, None).seat(TRAINER)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.FINISHED, trainer, TRAINER)
    await bench.clock.sleep(15.0)  # environments get some time to clean up
    assert shard_process.done() and shard.shard_job is None and not tasks
    assert list(ledger.directory.parent.iterdir()) == [ledger.directory]
    assert ledger.directory.name == "shard-0"


@story_on(run_with_processes)
async def test_jobs_that_fail_at_once_leak_nothing(place: ShardProcesses) -> None:
    async def fail_job(number: int) -> None:
        job = f"broken-{number}"
        await submit(place.state, job)
        await place.state.run_command("HSET", f"{{{job}}}:job", "phase", "training")
        await place.served(job)
        row = await jobs.read_job(place.state, job)
        assert row.phase == jobs.Phase.FAILED and "ConfigError" in row.error
        await delete_job(place.state, job, f"delete-{job}")

    async def count_keys_and_tasks() -> tuple[int, int]:
        await place.clock.sleep(FORGOTTEN_S)
        await jobs.read_jobs(place.state)
        await registry.list_entries(place.state)
        return len(await place.state.run_command("KEYS", "*")), len(asyncio.all_tasks())

    for number in range(FIRST):
        await fail_job(number)
    before = await count_keys_and_tasks()
    for number in range(FIRST, FAILING):
        await fail_job(number)
    assert await count_keys_and_tasks() == before


PAUSE_S = 1.5 * UNAVAILABLE_TIMEOUT_S
PLAN = EvaluationPlan("step-0", 0, ("sampled",))


async def set_block_reason(bench: ShardBench, count_keys_and_tasks: str) -> None:
    """Set the planner's block reason of the job."""
    await bench.state.run_command(
        "HSET", f"{job_prefix(JOB)}:job", "block_reason", count_keys_and_tasks
    )


async def poll_forever(shard: RolloutShard, bench: ShardBench) -> None:
    while await shard._poll(bench.job):
        await bench.clock.sleep(5.0)


async def under_way(bench: ShardBench) -> None:
    """Wait until rewards are requested and tokens of other trajectories are in flight."""
    while not bench.sandbox.scoring:
        await bench.clock.sleep(0.01)


@story_on(run_on_shard, "tmp_path")
async def test_paused_job_resumes_with_the_same_trajectories_and_sessions(
    bench: ShardBench, tmp_path: Path
) -> None:
    shard = RolloutShard(bench.mesh, tmp_path)
    shard.shard_job, shard._lineage = bench.job, 0
    bench.sandbox.takes_s = 30.0  # so that rewards are pending at the pause
    tasks: list[asyncio.Task[Any]] = [await bench.group() for _ in range(4)]
    tasks.append(asyncio.create_task(evaluate(bench.job, PLAN, 0)))
    await under_way(bench)
    await set_block_reason(bench, "paused: preempted by another")
    assert await shard._poll(bench.job)
    await bench.leave()
    await bench.clock.sleep(10.0)
    before = {t.id: (t, t.length) for t in bench.job.runner.active_trajectories}
    sessions, rest = set(bench.sandbox.sessions), [t for t in tasks if not t.done()]
    assert len(before) > ENGINES and sessions and tasks[-1] in rest

    polls = asyncio.create_task(poll_forever(shard, bench))
    admissions = asyncio.create_task(bench.job.admit_forever())
    opened = (await jobs.read_job(bench.state, JOB)).opened
    await bench.clock.sleep(PAUSE_S)
    assert not any(task.done() for task in rest) and bench.sandbox.sessions == sessions
    assert (await jobs.read_job(bench.state, JOB)).opened == opened, "nothing is admitted"
    admissions.cancel()

    bench.sandbox.takes_s = 0.0
    await bench.join_again()
    await set_block_reason(bench, "")
    async with bench.clock.timeout(60.0, "the rest of the trajectories"):
        await asyncio.gather(*tasks)
    for t, length in before.values():
        assert t.outcome is not None and t.outcome.reason != "failed", t.outcome
        assert t.length >= length
    (result,) = [e["result"] for e in await jobs.read_evaluations(bench.state, JOB)]
    assert result["failed"] == 0
    assert (await groups.count_in_flight(bench.state, JOB)).ready == 4
    event_kinds = {e.kind for e in await events.read_all(bench.state)}
    assert not {"dropped", "requeued", "failure"} & event_kinds, event_kinds
    polls.cancel()


@story_on(run_on_shard, "tmp_path")
async def test_shard_drains_after_its_groups_and_resumes_with_its_host(
    bench: ShardBench, tmp_path: Path
) -> None:
    shard = RolloutShard(bench.mesh, tmp_path)
    shard.shard_job, shard._lineage = bench.job, 0
    host = bench.mesh.settings.host

    async def poll_and_count_groups() -> int:
        assert await shard._poll(bench.job)
        await bench.clock.sleep(0.5)
        return (await jobs.read_job(bench.state, JOB)).opened

    async def under_way() -> int:
        return (await groups.count_in_flight(bench.state, JOB)).open

    admissions = asyncio.create_task(bench.job.admit_forever())
    await poll_and_count_groups()
    while not bench.job.runner.active_trajectories:
        await poll_and_count_groups()
    assert not shard.is_drained

    await pool.set_drain_reason(bench.state, host, "maintenance")
    opened = await poll_and_count_groups()
    assert await under_way() and not shard.is_drained, "what it has begun it ends"
    async with bench.clock.timeout(600.0, "the end of its groups"):
        while not shard.is_drained:
            assert await poll_and_count_groups() == opened
    assert shard.stats()["rests"] and not await under_way()
    assert (await groups.count_in_flight(bench.state, JOB)).samples == opened, "nothing is lost"

    await pool.set_drain_reason(bench.state, host, "")
    await poll_and_count_groups()
    assert await poll_and_count_groups() > opened and not shard.is_drained
    admissions.cancel()
