"""A job whose environment never answers delays no other job of its mesh; its processes, which wait
for the answers, end when it is cancelled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.common.state import events, groups, jobs
from meshrl.common.state.lifecycle.accounting import account
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from meshrl.sim.process import VirtualProcess
from tests.mesh.simulated.worlds import on_world, until_over

STEPS, WORKERS = 3, 4
SOON_S = 60.0 + 10.0 * STEPS  # processes start, and steps are made, as without the other job
HANGING = f"{JOB}-2"
CLOSING_S = 60.0  # for the processes of jobs that have ended


def hang(world: World) -> None:
    """Environments of one job take what they are told, and answer nothing."""
    answering = world.machine.programs["meshrl.services.environment"]

    async def environment(process: VirtualProcess, argv: list[str]) -> None:
        if HANGING not in " ".join(argv):
            return await answering(process, argv)
        while await process.channel.to_child.get() is not None:
            pass

    world.machine.programs["meshrl.services.environment"] = environment


def of_jobs(world: World) -> set[str]:
    kinds = ("rollout/", "environment-")
    return {process.name for process in world.machine.alive if process.name.startswith(kinds)}


async def beside(world: World) -> dict[str, Any]:
    hang(world)
    await until_over(world)
    took_s = world.clock.monotonic()
    row = await jobs.job(world.state, HANGING)
    await jobs.cancel(world.state, HANGING, "cancel")
    async with world.clock.timeout(CLOSING_S, "the end of the jobs' processes"):
        while of_jobs(world):
            await world.clock.sleep(1.0)
    return {
        "took_s": took_s,
        "hanging": row,
        "events": [e for e in await events.read_all(world.state) if e.fields.get("job") == JOB],
        "in_flight": (await groups.in_flight(world.state, JOB)).samples,
    }


@pytest.mark.rotating(2)
@pytest.mark.timeout(300)
def test_a_job_beside_one_that_hangs_is_not_delayed(tmp_path: Path) -> None:
    seen = on_world(tmp_path, Size(WORKERS, steps=STEPS, jobs=2), beside)
    assert seen["hanging"].phase == jobs.Phase.BASELINE, "it hung all the while"
    assert seen["took_s"] <= SOON_S
    counted = account(seen["events"], seen["in_flight"], JOB)
    assert counted["lost"] == counted["trained_twice"] == counted["in_flight"] == 0
