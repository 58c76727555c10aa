"""A job without steps evaluates the version that training would begin from, and is finished."""

from pathlib import Path
from typing import Any

from meshrl.common.state import events, jobs
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over


def test_a_job_without_steps_is_evaluated_and_opens_no_group(tmp_path: Path) -> None:
    async def job(world: World) -> dict[str, Any]:
        await until_over(world)
        return {
            "evaluations": await jobs.evaluations(world.state, JOB),
            "kinds": {event.kind for event in await events.read_all(world.state)},
        }

    seen = on_world(tmp_path, Size(workers=2, steps=0), job, limit_s=600.0)
    assert [row["tag"] for row in seen["evaluations"]] == ["before"]
    assert seen["evaluations"][0]["result"]["problems"] == 2
    assert not seen["kinds"] & {"opened", "step"}
