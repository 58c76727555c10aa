"""A job whose document changes while its trainer is away: steps are repeated as they were done."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.job.changing import changed
from meshrl.common.state import jobs
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

STEPS, EVERY = 12, 3  # a checkpoint every third step


@pytest.mark.deep
def test_steps_from_before_a_change_are_repeated_with_what_was_in_force(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        while (row := await jobs.job(world.state, JOB)).version < 2 * EVERY - 1:
            await world.clock.sleep(0.2)
        assert row.version % EVERY == EVERY - 1  # two steps stand in their records alone
        now = {"optimizer.final_lr": 0.9, "optimizer.warmup_steps": 0}
        document = changed(row.document, now)
        changes = {key: (row.document["optimizer"][key[10:]], now[key]) for key in now}
        assert not await jobs.change(world.state, JOB, document, changes, "change")
        killed = next(p for p in world.machine.alive if p.name.startswith("trainer/"))
        killed.kill()
        await until_over(world)
        row = await jobs.job(world.state, JOB)
        assert (row.version, row.lineage) == (STEPS, 0)
        assert row.document["optimizer"]["final_lr"] == 0.9

    on_world(tmp_path, Size(steps=STEPS), story)
