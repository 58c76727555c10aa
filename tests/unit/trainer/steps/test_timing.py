"""A step tells its phases, its intake and its rounds; a checkpoint when it is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.files.lines import whole
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, TrackingConfig
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED
from meshrl.services.trainer.steps.timing import StepTimes
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost

Story = Callable[[StepTimes, VirtualClock], Awaitable[None]]


def told(root: Path, story: Story, share: float = 1.0) -> list[dict[str, Any]]:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = alone("trainer/tiny", clock, random, SimulatedHost(clock, random.child("host")))
        config = JobConfig(name="tiny", tracking=TrackingConfig(trace=share))
        times = StepTimes(mesh, JobData("tiny", config, root / "bundle", root))
        await story(times, clock)
        await times.close()

    run_virtual(main)
    return list(whole(root / "trace" / "trainer.jsonl"))


async def step(times: StepTimes, clock: VirtualClock) -> None:
    times.begin(3)
    times.enter("waiting")
    await clock.sleep(2.0)
    times.intake.enter("pack")
    times.enter("computing")
    began = clock.monotonic()
    await clock.sleep(0.5)
    times.intake.enter("")
    times.enter("writing")  # of the checkpoint before: that is no phase of this step
    times.checkpoint(2, 4.0)
    times.round(began, clock.monotonic() - began)
    await clock.sleep(0.25)
    times.enter("committing")
    await clock.sleep(1.0)


def test_phases_fill_a_step_while_a_checkpoint_is_written_beside_it(tmp_path: Path) -> None:
    async def story(times: StepTimes, clock: VirtualClock) -> None:
        await step(times, clock)
        times.ended(tokens=700)

    written, done = told(tmp_path, story)
    assert (written["kind"], written["step"], written["parts"]) == ("checkpoint", 2, ["write", 4e3])
    assert (done["kind"], done["step"], done["tokens"]) == ("step", 3, 700)
    assert done["parts"] == ["waiting", 2000.0, "computing", 750.0, "committing", 1000.0]
    assert done["intake"] == ["wait", 2000.0, "pack", 500.0, "", 1250.0]
    assert done["rounds"] == [2000.0, 500.0]
    assert done["at"] == pytest.approx(written["at"] + 4.0 - 2.5)


def test_a_step_that_is_cut_off_is_not_told_and_the_next_one_is_its_own(tmp_path: Path) -> None:
    async def story(times: StepTimes, clock: VirtualClock) -> None:
        await step(times, clock)
        await step(times, clock)
        times.ended(tokens=1)

    rows = [row for row in told(tmp_path, story) if row["kind"] == "step"]
    assert len(rows) == 1 and rows[0]["rounds"] == [2000.0, 500.0]


def test_a_job_without_traces_times_no_step(tmp_path: Path) -> None:
    async def story(times: StepTimes, clock: VirtualClock) -> None:
        await step(times, clock)
        assert times.intake is UNTIMED
        times.ended(tokens=1)

    assert told(tmp_path, story, share=0.0) == []
