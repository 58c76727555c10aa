"""Engines that a signal ends at each start: their job fails by name, and the mesh goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshrl.common.state import events, jobs, registry
from meshrl.sim.mesh.job.job import JOB
from meshrl.sim.mesh.world.world import Size, World
from tests.mesh.simulated.worlds import on_world, until_over

SEES_S = 300.0  # by then the job has failed
AGAIN = "again"


@pytest.mark.rotating(2)
def test_a_signal_at_each_start_fails_the_job_and_leaves_the_mesh_up(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        began = world.clock.monotonic()
        while world.phase != "failed" and world.clock.monotonic() - began < SEES_S:
            for process in world.machine.alive:
                if process.kind == "engine":
                    process.end(-signal.SIGSEGV)
            await world.clock.sleep(0.3)
        row = await jobs.job(world.state, JOB)
        assert row.phase == "failed", row.phase
        assert row.error.startswith("engine/") and "signal 11 (SIGSEGV)" in row.error
        told = [e for e in await events.read_all(world.state) if e.kind == "process_ended"]
        assert {e.fields["name"].split("/")[0] for e in told} == {"engine"}
        there = {e.kind for e in await registry.entries(world.state) if e.alive}
        assert {"planner", "weights", "node", "worker"} <= there
        await jobs.reopen(world.state, JOB, AGAIN)
        await until_over(world)

    on_world(tmp_path, Size(steps=2), story)
