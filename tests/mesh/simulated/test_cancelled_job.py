"""A job that a person stops lets go of its workers, and loses nothing when it goes on."""

from pathlib import Path
from typing import Any

import pytest

from meshrl.common.state import events, groups, jobs
from meshrl.common.state.lifecycle.accounting import account
from meshrl.common.state.pool.store import store as pool
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

STEPS = 3


@pytest.mark.rotating(2)
@pytest.mark.timeout(200)
def test_a_cancelled_job_frees_its_workers_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async def story(world: World) -> dict[str, Any]:
        state, clock = world.state, world.clock
        while (await jobs.job(state, JOB)).version < 1:
            await clock.sleep(0.5)
        assert await jobs.cancel(state, JOB, "cancelled")
        while await pool.gangs(state):
            await clock.sleep(1.0)
        stopped = await jobs.job(state, JOB)
        await clock.sleep(10.0)
        later = await jobs.job(state, JOB)
        assert (later.phase, later.version) == ("stopped", stopped.version), "nobody works on it"
        await jobs.reopen(state, JOB, "reopened")
        await until_over(world)
        in_flight = (await groups.in_flight(state, JOB)).samples
        return account(await events.read_all(state), in_flight, JOB) | {
            "steps": (await jobs.job(state, JOB)).steps_done
        }

    found = on_world(tmp_path, Size(workers=2, steps=STEPS), story, seed=4)
    assert found["steps"] == STEPS
    assert found["lost"] == found["trained_twice"] == found["host_lost"] == 0
