"""The life of a shard is that of its job: it waits for the job to begin, and ends with it; of jobs
that fail at once, however many, nothing stays.
"""

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
from tests.unit.rollout.shard_bench import ENGINES, ShardBench, on_shard

FAILING = 80  # jobs
FIRST = 30  # after so many, everything that is made once has been made
FORGOTTEN_S = 700.0  # the registry knows the dead for ten minutes


class Place:
    """A Redis, and the shards of any job."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random, self.state = clock, random, open_simulated_state(clock)

    def mesh(self, job: str) -> Mesh:
        host = SimulatedHost(self.clock, self.random.child("host"))
        return alone(shard_name(job, 0), self.clock, self.random.child(job), host, state=self.state)

    def served(self, job: str) -> asyncio.Task[None]:
        """The life of a shard's process, which has ended when the task has."""
        return asyncio.create_task(serve(self.mesh(job)))


def in_place(story: Callable[[Place], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(Place(clock, random))

    run_virtual(main)


async def submit(state: StateClient, job: str) -> None:
    """One with a key that no job has."""
    found = document() | {"bundle": {"dir": ""}, "renamed": 1}
    await jobs.submit(state, job, found, "", f"submit-{job}")


@story_on(in_place)
async def test_it_waits_for_its_job_to_begin_and_ends_if_it_never_does(place: Place) -> None:
    await submit(place.state, "patient")
    living = place.served("patient")
    await place.clock.sleep(300.0)
    assert not living.done(), "the job is queued"
    await jobs.cancel(place.state, "patient", "cancel")
    await place.clock.sleep(5.0)
    assert living.done() and living.result() is None


@story_on(in_place)
async def test_one_of_a_job_that_is_not_on_record_any_more_ends(place: Place) -> None:
    await submit(place.state, "gone")
    living = place.served("gone")
    await place.clock.sleep(10.0)
    await jobs.cancel(place.state, "gone", "cancel")
    await delete_job(place.state, "gone", "delete")
    await place.clock.sleep(5.0)
    assert living.done() and living.result() is None


@story_on(on_shard, "tmp_path")
async def test_it_closes_all_when_its_job_has_ended(bench: ShardBench, tmp_path: Path) -> None:
    await bench.job.close()
    shard = RolloutShard(bench.mesh, tmp_path)
    living = asyncio.create_task(shard.serve())
    await bench.clock.sleep(1.0)
    assert shard.shard_job is not None and shard.stats()["job"] == JOB
    ledger, tasks = shard.shard_job.runner.ledger, shard._background_tasks
    trainer = await Bench(bench.state, None).seat(TRAINER)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.FINISHED, trainer, TRAINER)
    await bench.clock.sleep(15.0)  # environments get some time to clean up
    assert living.done() and shard.shard_job is None and not tasks
    assert list(ledger.directory.parent.iterdir()) == [ledger.directory]
    assert ledger.directory.name == "shard-0"


@story_on(in_place)
async def test_of_jobs_that_fail_at_once_nothing_stays(place: Place) -> None:
    async def one(number: int) -> None:
        job = f"broken-{number}"
        await submit(place.state, job)
        await place.state.run_command("HSET", f"{{{job}}}:job", "phase", "training")
        await place.served(job)
        row = await jobs.read_job(place.state, job)
        assert row.phase == jobs.Phase.FAILED and "ConfigError" in row.error
        await delete_job(place.state, job, f"delete-{job}")

    async def held() -> tuple[int, int]:
        await place.clock.sleep(FORGOTTEN_S)
        await jobs.read_jobs(place.state)
        await registry.list_entries(place.state)
        return len(await place.state.run_command("KEYS", "*")), len(asyncio.all_tasks())

    for number in range(FIRST):
        await one(number)
    before = await held()
    for number in range(FIRST, FAILING):
        await one(number)
    assert await held() == before


PAUSE_S = 1.5 * UNAVAILABLE_TIMEOUT_S
PLAN = EvaluationPlan("step-0", 0, ("sampled",))


async def hold(bench: ShardBench, held: str) -> None:
    """What the planner writes."""
    await bench.state.run_command("HSET", f"{job_prefix(JOB)}:job", "held", held)


async def looking(shard: RolloutShard, bench: ShardBench) -> None:
    while await shard._poll(bench.job):
        await bench.clock.sleep(5.0)


async def under_way(bench: ShardBench) -> None:
    """Until rewards are asked for, and tokens of others are coming."""
    while not bench.sandbox.scoring:
        await bench.clock.sleep(0.01)


@story_on(on_shard, "tmp_path")
async def test_a_paused_job_goes_on_with_the_same_trajectories_and_sessions(
    bench: ShardBench, tmp_path: Path
) -> None:
    shard = RolloutShard(bench.mesh, tmp_path)
    shard.shard_job, shard._lineage = bench.job, 0
    bench.sandbox.takes_s = 30.0  # so that rewards are asked for when it goes
    tasks: list[asyncio.Task[Any]] = [await bench.group() for _ in range(4)]
    tasks.append(asyncio.create_task(evaluate(bench.job, PLAN, 0)))
    await under_way(bench)
    await hold(bench, "paused: preempted by another")
    assert await shard._poll(bench.job)
    await bench.leave()
    await bench.clock.sleep(10.0)
    before = {t.id: (t, t.length) for t in bench.job.runner.active_trajectories}
    sessions, rest = set(bench.sandbox.sessions), [t for t in tasks if not t.done()]
    assert len(before) > ENGINES and sessions and tasks[-1] in rest

    looks = asyncio.create_task(looking(shard, bench))
    admits = asyncio.create_task(bench.job.admit_forever())
    opened = (await jobs.read_job(bench.state, JOB)).opened
    await bench.clock.sleep(PAUSE_S)
    assert not any(task.done() for task in rest) and bench.sandbox.sessions == sessions
    assert (await jobs.read_job(bench.state, JOB)).opened == opened, "nothing is admitted"
    admits.cancel()

    bench.sandbox.takes_s = 0.0
    await bench.join_again()
    await hold(bench, "")
    async with bench.clock.timeout(60.0, "the rest of the trajectories"):
        await asyncio.gather(*tasks)
    for t, length in before.values():
        assert t.outcome is not None and t.outcome.reason != "failed", t.outcome
        assert t.length >= length
    (result,) = [e["result"] for e in await jobs.read_evaluations(bench.state, JOB)]
    assert result["failed"] == 0
    assert (await groups.count_in_flight(bench.state, JOB)).ready == 4
    told = {e.kind for e in await events.read_all(bench.state)}
    assert not {"dropped", "requeued", "failure"} & told, told
    looks.cancel()


@story_on(on_shard, "tmp_path")
async def test_a_shard_rests_when_its_groups_are_finished_and_goes_on_when_its_host_does(
    bench: ShardBench, tmp_path: Path
) -> None:
    shard = RolloutShard(bench.mesh, tmp_path)
    shard.shard_job, shard._lineage = bench.job, 0
    host = bench.mesh.settings.host

    async def look() -> int:
        assert await shard._poll(bench.job)
        await bench.clock.sleep(0.5)
        return (await jobs.read_job(bench.state, JOB)).opened

    async def under_way() -> int:
        return (await groups.count_in_flight(bench.state, JOB)).open

    admits = asyncio.create_task(bench.job.admit_forever())
    await look()
    while not bench.job.runner.active_trajectories:
        await look()
    assert not shard.is_drained

    await pool.set_drain_reason(bench.state, host, "maintenance")
    opened = await look()
    assert await under_way() and not shard.is_drained, "what it has begun it ends"
    async with bench.clock.timeout(600.0, "the end of its groups"):
        while not shard.is_drained:
            assert await look() == opened
    assert shard.stats()["rests"] and not await under_way()
    assert (await groups.count_in_flight(bench.state, JOB)).samples == opened, "nothing is lost"

    await pool.set_drain_reason(bench.state, host, "")
    await look()
    assert await look() > opened and not shard.is_drained
    admits.cancel()
