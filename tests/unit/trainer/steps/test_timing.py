"""Phases and parts of a step's duration, and its wait for the evaluation of a version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.files.json_lines import iterate_rows
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import (
    BudgetConfig,
    DatasetConfig,
    EvaluationConfig,
    JobConfig,
    RewardConfig,
    TrackingConfig,
)
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH
from meshrl.common.state import jobs
from meshrl.services.trainer.core.step_commits import wait_for_evaluation
from meshrl.services.trainer.steps.step_durations import StepPartTimer
from meshrl.services.trainer.steps.step_traces import StepTraceWriter
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.generation.engines_under_test import ManualClock

Story = Callable[[StepTraceWriter, VirtualClock], Awaitable[None]]


def run_and_read_traces(root: Path, story: Story, share: float = 1.0) -> list[dict[str, Any]]:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = alone("trainer/tiny", clock, random, SimulatedHost(clock, random.child("host")))
        config = JobConfig(name="tiny", tracking=TrackingConfig(trace=share))
        times = StepTraceWriter(mesh, JobData("tiny", config, root / "bundle", root))
        await story(times, clock)
        await times.close()

    run_virtual(main)
    return list(iterate_rows(root / "trace" / "trainer.jsonl"))


async def step(times: StepTraceWriter, clock: VirtualClock) -> None:
    times.begin_step(3)
    times.enter_phase("waiting")
    await clock.sleep(2.0)
    times.intake.enter("pack")
    times.enter_phase("computing")
    began = clock.monotonic()
    await clock.sleep(0.5)
    times.intake.enter("")
    times.enter_phase("writing")  # for the previous checkpoint: not a phase of this step
    times.add_checkpoint(2, 4.0)
    times.add_round(began, clock.monotonic() - began)
    await clock.sleep(0.25)
    times.enter_phase("committing")
    await clock.sleep(1.0)


def test_phases_cover_a_step_during_a_checkpoint_write(tmp_path: Path) -> None:
    async def story(times: StepTraceWriter, clock: VirtualClock) -> None:
        await step(times, clock)
        times.end_step(tokens=700)

    written, done = run_and_read_traces(tmp_path, story)
    assert (written["kind"], written["step"], written["parts"]) == ("checkpoint", 2, ["write", 4e3])
    assert (done["kind"], done["step"], done["tokens"]) == ("step", 3, 700)
    assert done["parts"] == ["waiting", 2000.0, "computing", 750.0, "committing", 1000.0]
    assert done["intake"] == ["wait", 2000.0, "pack", 500.0, "", 1250.0]
    assert done["rounds"] == [2000.0, 500.0]
    assert done["at"] == pytest.approx(written["at"] + 4.0 - 2.5)


def test_cancelled_step_is_not_traced_and_the_next_one_starts_fresh(tmp_path: Path) -> None:
    async def story(times: StepTraceWriter, clock: VirtualClock) -> None:
        await step(times, clock)
        await step(times, clock)
        times.end_step(tokens=1)

    rows = [row for row in run_and_read_traces(tmp_path, story) if row["kind"] == "step"]
    assert len(rows) == 1 and rows[0]["rounds"] == [2000.0, 500.0]


def test_job_without_traces_writes_no_step_times(tmp_path: Path) -> None:
    async def story(times: StepTraceWriter, clock: VirtualClock) -> None:
        await step(times, clock)
        assert times.intake is NULL_STOPWATCH
        times.end_step(tokens=1)

    assert run_and_read_traces(tmp_path, story, share=0.0) == []


def test_parts_add_up_within_a_step_and_in_total() -> None:
    clock = ManualClock()
    parts = StepPartTimer(clock.monotonic)
    for seconds in (1.0, 3.0):
        parts.begin_step()
        for _ in range(2):
            with parts.measure("stage"):
                clock.advance(seconds)
        parts.add("update", 0.25)
        parts.end_step()
    assert parts.rounded_last_step_s == {"stage": 6.0, "update": 0.25}
    assert parts.total_s == {"stage": 8.0, "update": 0.5}


def test_cancelled_step_counts_only_in_the_total() -> None:
    clock = ManualClock()
    parts = StepPartTimer(clock.monotonic)
    parts.begin_step()
    with pytest.raises(KeyError), parts.measure("stage"):
        clock.advance(2.0)
        raise KeyError
    parts.begin_step()
    with parts.measure("commit"):
        clock.advance(0.5)
    parts.end_step()
    assert parts.rounded_last_step_s == {"commit": 0.5}
    assert parts.total_s == {"stage": 2.0, "commit": 0.5}


HOLD_S = 60.0


class Bench:
    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock = clock
        self.mesh = alone(
            "rollout/calc/0", clock, random, SimulatedHost(clock, random.child("host"))
        )
        config = JobConfig(
            dataset=DatasetConfig(held_out="held_out.jsonl"),
            reward=RewardConfig(use="m:f"),
            evaluation=EvaluationConfig(every=4, max_wait_s=HOLD_S),
            budget=BudgetConfig(steps=8),
        )
        self.data = JobData("calc", config, Path(), Path())

    async def submit(self) -> None:
        await self.mesh.join(None)
        await jobs.submit(self.mesh.state, "calc", self.data.config.to_document(), "", "op")

    async def record(self, version: int) -> None:
        tag, name, token = f"step-{version}", self.mesh.name, self.mesh.token
        await jobs.record_evaluation(
            self.mesh.state, "calc", jobs.EvaluationRecord(tag, 0, version, {}), name, token
        )

    async def measure_wait(self, version: int) -> float:
        start_core = self.clock.monotonic()
        await wait_for_evaluation(self.mesh, self.data, version)
        return self.clock.monotonic() - start_core


def run_on_bench(story: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.submit()
        await story(bench)

    run_virtual(main, limit_s=3600.0)


@story_on(run_on_bench)
async def test_version_without_evaluation_causes_no_wait(bench: Bench) -> None:
    for version in (0, 1, 3, 8):
        assert await bench.measure_wait(version) == 0.0


@story_on(run_on_bench)
async def test_commit_waits_for_the_recorded_result(bench: Bench) -> None:
    waiting = asyncio.ensure_future(bench.measure_wait(4))
    await bench.clock.sleep(20.0)
    assert not waiting.done()
    [wait] = bench.mesh.waits.list_longest([])
    assert (wait["on"], wait["what"]) == ("rollout/calc/0", "the evaluation of version 4")
    await bench.record(4)
    assert 20.0 <= await waiting < 21.0
    assert await bench.measure_wait(4) < 1.0, "a predecessor's result counts"


@story_on(run_on_bench)
async def test_commit_continues_after_the_evaluation_timeout(bench: Bench) -> None:
    assert HOLD_S <= await bench.measure_wait(4) < HOLD_S + 1.0


@story_on(run_on_bench)
async def test_pause_is_excluded_from_the_evaluation_wait(bench: Bench) -> None:
    waiting = asyncio.ensure_future(bench.measure_wait(4))
    await bench.clock.sleep(HOLD_S / 2)
    bench.mesh.job_clock.set_paused(True)
    await bench.clock.sleep(10 * HOLD_S)
    assert not waiting.done() and not bench.mesh.waits.list_longest([])
    bench.mesh.job_clock.set_paused(False)
    await bench.clock.sleep(5.0)
    [wait] = bench.mesh.waits.list_longest([])
    assert bench.clock.wall() - wait["since_ms"] / 1000 <= 5.0
    assert 11 * HOLD_S <= await waiting < 11 * HOLD_S + 1.0


@story_on(run_on_bench)
async def test_ended_job_causes_no_wait(bench: Bench) -> None:
    state, name, token = bench.mesh.state, bench.mesh.name, bench.mesh.token
    await jobs.set_phase(state, "calc", jobs.Phase.STOPPED, token, name)
    assert await bench.measure_wait(4) < 1.0
