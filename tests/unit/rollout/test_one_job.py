"""The life of a shard is that of its job: it waits for the job to begin, and ends with it; of jobs
that fail at once, however many, nothing stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs, registry
from meshrl.common.state.lifecycle.deleting import delete
from meshrl.common.state.pool.workers.names import shard
from meshrl.common.state.redis.client import State
from meshrl.services.rollout.__main__ import serve
from meshrl.services.rollout.shard import RolloutShard
from meshrl.sim.loop import VirtualClock, run_virtual
from meshrl.sim.redis.state import simulated_state
from tests.contract.state.state_bench import JOB, TRAINER, Bench, document
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ShardBench, on_shard

FAILING = 80  # jobs
FIRST = 30  # after so many, everything that is made once has been made
FORGOTTEN_S = 700.0  # the registry knows the dead for ten minutes


class Place:
    """A Redis, and the shards of any job."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random, self.state = clock, random, simulated_state(clock)

    def mesh(self, job: str) -> Mesh:
        host = SimulatedHost(self.clock, self.random.child("host"))
        return alone(shard(job, 0), self.clock, self.random.child(job), host, state=self.state)

    def served(self, job: str) -> asyncio.Task[None]:
        """The life of a shard's process, which has ended when the task has."""
        return asyncio.create_task(serve(self.mesh(job)))


def in_place(story: Callable[[Place], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        await story(Place(clock, random))

    run_virtual(main)


async def submit(state: State, job: str) -> None:
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
    await delete(place.state, "gone", "delete")
    await place.clock.sleep(5.0)
    assert living.done() and living.result() is None


@story_on(on_shard, "tmp_path")
async def test_it_closes_what_it_has_open_when_its_job_has_ended(
    bench: ShardBench, tmp_path: Path
) -> None:
    await bench.job.close()
    shard = RolloutShard(bench.mesh, tmp_path)
    living = asyncio.create_task(shard.serve())
    await bench.clock.sleep(1.0)
    assert shard.serving is not None and shard.stats()["job"] == JOB
    ledger, tasks = shard.serving.runner.ledger, shard._background
    trainer = await Bench(bench.state, None).seat(TRAINER)
    await jobs.set_phase(bench.state, JOB, jobs.Phase.FINISHED, trainer, TRAINER)
    await bench.clock.sleep(15.0)  # environments get some time to clean up
    assert living.done() and shard.serving is None and not tasks
    assert list(ledger.directory.parent.iterdir()) == [ledger.directory]
    assert ledger.directory.name == "shard-0"


@story_on(in_place)
async def test_of_jobs_that_fail_at_once_nothing_stays(place: Place) -> None:
    async def one(number: int) -> None:
        job = f"broken-{number}"
        await submit(place.state, job)
        await place.state.command("HSET", f"{{{job}}}:job", "phase", "training")
        await place.served(job)
        row = await jobs.job(place.state, job)
        assert row.phase == jobs.Phase.FAILED and "ConfigError" in row.error
        await delete(place.state, job, f"delete-{job}")

    async def held() -> tuple[int, int]:
        await place.clock.sleep(FORGOTTEN_S)
        await jobs.jobs(place.state)
        await registry.entries(place.state)
        return len(await place.state.command("KEYS", "*")), len(asyncio.all_tasks())

    for number in range(FIRST):
        await one(number)
    before = await held()
    for number in range(FIRST, FAILING):
        await one(number)
    assert await held() == before
