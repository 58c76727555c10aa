"""A shard says exactly what its training trajectories took, and where."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.common.state.pool.demand.measured import MeasuredWork, work_of
from meshrl.services.rollout.evaluation import evaluate
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ShardBench, on_shard

SCORE_S = 3.0


def work(bench: ShardBench) -> MeasuredWork:
    return bench.job.runner.worked.work(bench.job.runner.commits.recorded)


@story_on(on_shard, "tmp_path")
async def test_time_is_at_engines_in_queues_or_in_tools_and_what_is_in_flight_counts(
    bench: ShardBench,
) -> None:
    bench.sandbox.takes_s = SCORE_S
    began = bench.clock.monotonic()
    tasks = [await bench.group() for _ in range(5)]  # 15 trajectories, and 8 slots
    await bench.clock.sleep(0.5)
    early = work(bench)
    assert early.flight_s == pytest.approx(15 * (bench.clock.monotonic() - began), abs=1e-6)
    assert early.queue_s > 1.0 and early.engine_s > 1.0 and early.trajectories == 0
    await asyncio.gather(*tasks)
    late = work(bench)
    assert (late.groups, late.trajectories) == (5, 15)
    assert late.flight_s == pytest.approx(late.engine_s + late.queue_s + late.tool_s)
    assert late.tool_s > 15 * SCORE_S and late.sampled > 0
    assert late.sampled == sum(s.engine.tokens_generated for s in bench.engines)
    await bench.clock.sleep(100.0)
    assert work(bench) == late
    published = work_of(bench.job.stats().work)
    assert asdict(published) == pytest.approx(asdict(late), abs=0.001)


@story_on(on_shard, "tmp_path")
async def test_evaluation_counts_into_nothing(bench: ShardBench) -> None:
    await evaluate(bench.job, EvaluationPlan("step-0", 0, ("sampled",)), 0)
    assert bench.job.runner.commits.sampled > 0
    assert work(bench) == MeasuredWork() and bench.job.stats().work == {}


@pytest.mark.deep
@story_on(on_shard, "tmp_path")
async def test_a_pause_counts_into_nothing(bench: ShardBench) -> None:
    task = await bench.group()
    await bench.clock.sleep(0.1)
    bench.mesh.job_clock.hold(True)
    before = work(bench)
    await bench.clock.sleep(1000.0)
    assert work(bench).flight_s == before.flight_s
    bench.mesh.job_clock.hold(False)
    await task


@story_on(on_shard, "tmp_path")
async def test_the_gate_is_shut_while_it_holds_back_what_there_is_room_for(
    bench: ShardBench,
) -> None:
    job = bench.job
    admits = asyncio.create_task(job.admit_forever())
    job.admitting = True
    job.runner.freed.set()
    await bench.clock.sleep(2.0)
    assert work(bench).shut_s == 0, "the gate lets through more than there is room for"
    await close(bench)
    while job.runner.active:
        await bench.clock.sleep(0.01)
    shut_s = work(bench).shut_s
    await bench.clock.sleep(10.0)
    assert work(bench).shut_s == pytest.approx(shut_s + 10.0)
    job.admitting = False
    await bench.clock.sleep(1.0)
    shut_s = work(bench).shut_s
    await bench.clock.sleep(10.0)
    assert work(bench).shut_s == shut_s, "nobody asks"
    admits.cancel()


async def close(bench: ShardBench) -> None:
    """The staleness gate gives nothing from now on."""
    key = "{" + bench.job.job.id + "}:job"
    await bench.state.command("HSET", key, "groups_per_step", "0")


@story_on(on_shard, "tmp_path")
async def test_lengths_of_training_trajectories_that_ended_well_are_kept(bench: ShardBench) -> None:
    await asyncio.gather(*[await bench.group() for _ in range(5)])
    await asyncio.gather(*[await bench.group() for _ in range(5)])
    lengths = bench.job.runner.worked.lengths
    assert lengths is not None and lengths.count == bench.job.runner.worked.trajectories == 30
    sampled = work(bench).sampled
    assert lengths.sampled[0] <= sampled / 30 <= lengths.sampled[-1] and lengths.prompt > 0
    assert bench.job.stats().lengths == lengths.told()
    assert work(bench).prompted == pytest.approx(30 * lengths.prompt)
