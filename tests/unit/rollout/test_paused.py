"""A job that is paused: its engines and its sandbox go, for longer than anybody has patience, and
its trajectories, sessions and evaluation go on as if no time had passed.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.common.state import events, groups, jobs
from meshrl.common.state.redis.keys import job_prefix
from meshrl.services.rollout.evaluation import evaluate
from meshrl.services.rollout.rewards.sandboxes import PATIENCE_S
from meshrl.services.rollout.shard import RolloutShard
from tests.contract.state.state_bench import JOB
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ENGINES, ShardBench, on_shard

PAUSE_S = 1.5 * PATIENCE_S
PLAN = EvaluationPlan("step-0", 0, ("sampled",))


async def hold(bench: ShardBench, held: str) -> None:
    """What the planner writes."""
    await bench.state.command("HSET", f"{job_prefix(JOB)}:job", "held", held)


async def looking(shard: RolloutShard, bench: ShardBench) -> None:
    while await shard._turn(bench.job):
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
    shard.serving, shard._lineage = bench.job, 0
    bench.sandbox.takes_s = 30.0  # so that rewards are asked for when it goes
    tasks: list[asyncio.Task[Any]] = [await bench.group() for _ in range(4)]
    tasks.append(asyncio.create_task(evaluate(bench.job, PLAN, 0)))
    await under_way(bench)
    await hold(bench, "paused: preempted by another")
    assert await shard._turn(bench.job)
    await bench.leave()
    await bench.clock.sleep(10.0)
    before = {t.id: (t, t.length) for t in bench.job.runner.active}
    sessions, rest = set(bench.sandbox.sessions), [t for t in tasks if not t.done()]
    assert len(before) > ENGINES and sessions and tasks[-1] in rest

    looks = asyncio.create_task(looking(shard, bench))
    admits = asyncio.create_task(bench.job.admit_forever())
    opened = (await jobs.job(bench.state, JOB)).opened
    await bench.clock.sleep(PAUSE_S)
    assert not any(task.done() for task in rest) and bench.sandbox.sessions == sessions
    assert (await jobs.job(bench.state, JOB)).opened == opened, "nothing is admitted"
    admits.cancel()

    bench.sandbox.takes_s = 0.0
    await bench.join_again()
    await hold(bench, "")
    async with bench.clock.timeout(60.0, "the rest of the trajectories"):
        await asyncio.gather(*tasks)
    for t, length in before.values():
        assert t.ending is not None and t.ending.reason != "failed", t.ending
        assert t.length >= length
    (result,) = [e["result"] for e in await jobs.evaluations(bench.state, JOB)]
    assert result["failed"] == 0
    assert (await groups.in_flight(bench.state, JOB)).ready == 4
    told = {e.kind for e in await events.read_all(bench.state)}
    assert not {"dropped", "requeued", "failure"} & told, told
    looks.cancel()
