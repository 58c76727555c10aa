"""The next step's commit waits for the evaluation of the version that is current."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import (
    BudgetConfig,
    DatasetConfig,
    EvaluationConfig,
    JobConfig,
    RewardConfig,
)
from meshrl.common.state import jobs
from meshrl.services.trainer.core.committing import evaluated
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost

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
            evaluation=EvaluationConfig(every=4, hold_s=HOLD_S),
            budget=BudgetConfig(steps=8),
        )
        self.data = JobData("calc", config, Path(), Path())

    async def submit(self) -> None:
        await self.mesh.join(None)
        await jobs.submit(self.mesh.state, "calc", self.data.config.document(), "", "op")

    async def record(self, version: int) -> None:
        tag, name, token = f"step-{version}", self.mesh.name, self.mesh.token
        await jobs.record_evaluation(
            self.mesh.state, "calc", jobs.RecordedResult(tag, 0, version, {}), name, token
        )

    async def waited(self, version: int) -> float:
        started = self.clock.monotonic()
        await evaluated(self.mesh, self.data, version)
        return self.clock.monotonic() - started


def on_bench(story: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.submit()
        await story(bench)

    run_virtual(main, limit_s=3600.0)


def test_a_version_that_nobody_evaluates_holds_nothing_up() -> None:
    async def story(bench: Bench) -> None:
        for version in (0, 1, 3, 8):
            assert await bench.waited(version) == 0.0

    on_bench(story)


def test_the_commit_waits_until_the_result_is_on_record_and_says_so() -> None:
    async def story(bench: Bench) -> None:
        waiting = asyncio.ensure_future(bench.waited(4))
        await bench.clock.sleep(20.0)
        assert not waiting.done()
        [wait] = bench.mesh.waits.published([])
        assert (wait["on"], wait["what"]) == ("rollout/calc/0", "the evaluation of version 4")
        await bench.record(4)
        assert 20.0 <= await waiting < 21.0
        assert await bench.waited(4) < 1.0, "a predecessor's result counts"

    on_bench(story)


def test_training_goes_on_when_the_evaluation_does_not_come() -> None:
    async def story(bench: Bench) -> None:
        assert HOLD_S <= await bench.waited(4) < HOLD_S + 1.0

    on_bench(story)


def test_a_pause_is_no_part_of_what_the_commit_waits() -> None:
    async def story(bench: Bench) -> None:
        waiting = asyncio.ensure_future(bench.waited(4))
        await bench.clock.sleep(HOLD_S / 2)
        bench.mesh.job_clock.hold(True)
        await bench.clock.sleep(10 * HOLD_S)
        assert not waiting.done() and not bench.mesh.waits.published([])
        bench.mesh.job_clock.hold(False)
        await bench.clock.sleep(5.0)
        [wait] = bench.mesh.waits.published([])
        assert bench.clock.wall() - wait["since_ms"] / 1000 <= 5.0
        assert 11 * HOLD_S <= await waiting < 11 * HOLD_S + 1.0

    on_bench(story)


def test_a_job_that_has_ended_is_not_waited_for() -> None:
    async def story(bench: Bench) -> None:
        state, name, token = bench.mesh.state, bench.mesh.name, bench.mesh.token
        await jobs.set_phase(state, "calc", jobs.Phase.STOPPED, token, name)
        assert await bench.waited(4) < 1.0

    on_bench(story)
