"""A job's processes say what they have measured, all of them together what the job did."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.state import jobs, registry
from meshrl.common.state.pool.demand.measured import Measured, MeasuredWork, kind_of
from meshrl.common.state.pool.demand.planned import PublishedStats, measured
from meshrl.common.state.pool.store import store as pool
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

STEPS, LATE = 40, 8


async def published(world: World) -> Measured:
    """What the leader would see now."""
    kinds = {w.gang: kind_of(w.accelerator) for w in await pool.workers(world.state)}
    entries = [e for e in await registry.entries(world.state) if e.alive]
    about = [PublishedStats(e.name, e.kind, e.incarnation, e.stats) for e in entries]
    return measured([p for p in about if p.stats.get("job") == JOB], kinds)


@pytest.mark.deep
def test_shards_core_and_engines_tell_their_parts_of_what_a_job_did(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        while (await jobs.job(world.state, JOB)).version < STEPS // 2:
            await world.clock.sleep(0.2)
        await world.clock.sleep(7.0)  # all have renewed their leases since
        row, found = await jobs.job(world.state, JOB), await published(world)
        whole = sum(found.work.values(), MeasuredWork())
        by_kind = {name.partition("/")[0]: work for name, work in found.work.items()}
        assert set(by_kind) == {"rollout", "trainer"}
        assert STEPS // 2 <= whole.steps <= row.version
        a_step = row.document["algorithm"]["groups_per_step"]
        assert whole.groups >= (whole.steps - LATE) * a_step  # a shard may have told earlier
        assert whole.trajectories >= whole.groups and whole.sampled > whole.trajectories
        assert min(whole.busy_s, whole.wait_s, whole.work_s, whole.tokens) > 0
        assert whole.work_s < whole.busy_s and 0 < whole.held_s < whole.busy_s
        assert whole.flight_s > whole.engine_s > 0 and whole.tool_s > 0
        assert abs(whole.flight_s - whole.engine_s - whole.queue_s - whole.tool_s) < 0.01
        assert found.curves
        for curve in found.curves:
            assert curve.kind and curve.step_s(4, 20) > 0 and curve.steps > 8
        await until_over(world)

    on_world(tmp_path, Size(steps=STEPS), story)
