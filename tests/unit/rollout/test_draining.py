"""A shard whose host is to become empty ends what it has under way, and begins nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshrl.common.state import groups, jobs
from meshrl.common.state.pool.store import store as pool
from meshrl.services.rollout.shard import RolloutShard
from tests.contract.state.state_bench import JOB
from tests.stories import story_on
from tests.unit.rollout.shard_bench import ShardBench, on_shard


@story_on(on_shard, "tmp_path")
async def test_a_shard_rests_when_its_groups_are_finished_and_goes_on_when_its_host_does(
    bench: ShardBench, tmp_path: Path
) -> None:
    shard = RolloutShard(bench.mesh, tmp_path)
    shard.serving, shard._lineage = bench.job, 0
    host = bench.mesh.settings.host

    async def look() -> int:
        assert await shard._turn(bench.job)
        await bench.clock.sleep(0.5)
        return (await jobs.job(bench.state, JOB)).opened

    async def under_way() -> int:
        return (await groups.in_flight(bench.state, JOB)).open

    admits = asyncio.create_task(bench.job.admit_forever())
    await look()
    while not bench.job.runner.active:
        await look()
    assert not shard.rests

    await pool.mark_host(bench.state, host, "maintenance")
    opened = await look()
    assert await under_way() and not shard.rests, "what it has begun it ends"
    async with bench.clock.timeout(600.0, "the end of its groups"):
        while not shard.rests:
            assert await look() == opened
    assert shard.stats()["rests"] and not await under_way()
    assert (await groups.in_flight(bench.state, JOB)).samples == opened, "nothing is lost"

    await pool.mark_host(bench.state, host, "")
    await look()
    assert await look() > opened and not shard.rests
    admits.cancel()
