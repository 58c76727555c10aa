"""Clocks of paused jobs, and occupancy counters."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.errors import DeadlineExceeded, PeerLost
from meshrl.common.base.job_clock import JobClock
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.simulated_host import virtual
from tests.unit.common.generation.engines_under_test import ManualClock

PAUSE_S = 7200.0


async def pause_job(clock: VirtualClock, job: JobClock, after_s: float) -> None:
    await clock.sleep(after_s)
    job.set_paused(True)
    job.set_paused(True)
    await clock.sleep(PAUSE_S)
    job.set_paused(False)


@virtual
async def test_job_clock_stops_during_a_pause(clock: VirtualClock, random: Random) -> None:
    job = JobClock(clock)
    start_s = job.monotonic()
    pause_task = asyncio.ensure_future(pause_job(clock, job, 10.0))
    await clock.sleep(3600.0)
    assert job.is_paused and job.monotonic() - start_s == pytest.approx(10.0)
    await pause_task
    await clock.sleep(5.0)
    assert not job.is_paused and job.monotonic() - start_s == pytest.approx(15.0)


@pytest.mark.parametrize("start_s", [0.0, 60.0], ids=["before", "meanwhile"])
def test_deadline_keeps_its_remaining_time_during_a_pause(start_s: float) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        job = JobClock(clock)
        pause_task = asyncio.ensure_future(pause_job(clock, job, 30.0))
        await clock.sleep(start_s)
        with pytest.raises(DeadlineExceeded, match="a turn took longer than 100 s"):
            async with job.timeout(100.0, "a turn"):
                await clock.sleep(PAUSE_S + 1e6)
        assert pause_task.done()
        ran_before = max(0.0, 30.0 - start_s)
        assert clock.monotonic() == pytest.approx(30.0 + PAUSE_S + 100.0 - ran_before)
        async with job.timeout(1.0, "what ends in time"):
            await clock.sleep(0.5)
        job.set_paused(True)  # expired deadlines are not rescheduled
        job.set_paused(False)

    run_virtual(main, limit_s=1e7)


@virtual
async def test_job_clock_sleep_excludes_a_pause(clock: VirtualClock, random: Random) -> None:
    job = JobClock(clock)
    pause_task = asyncio.ensure_future(pause_job(clock, job, 1.0))
    await job.sleep(3.0)
    assert clock.monotonic() == pytest.approx(PAUSE_S + 3.0, abs=1.0)
    await pause_task


@virtual
async def test_retry_limit_excludes_a_pause(clock: VirtualClock, random: Random) -> None:
    job = JobClock(clock)
    pause_task = asyncio.ensure_future(pause_job(clock, job, 5.0))

    async def action() -> bool:
        if clock.monotonic() < PAUSE_S + 100.0:
            raise PeerLost("it sleeps")
        return True

    assert await retry(job, action, interval_s=5.0, limit_s=600.0)
    await pause_task


@virtual
async def test_wait_is_published_with_its_given_start(clock: VirtualClock, random: Random) -> None:
    waits = WaitTable(clock)
    await clock.sleep(50.0)
    with waits.wait("an engine", "engine/g0.0", waits.compute_start(20.0)):
        (published_wait,) = waits.list_longest([])
    assert clock.wall() * 1000 - published_wait["since_ms"] == pytest.approx(20_000, abs=1)


def test_occupancy_includes_current_occupants() -> None:
    clock = ManualClock()
    occupancy = Occupancy(clock.monotonic)
    with occupancy.occupy("tool"):
        clock.advance(2.0)
        with occupancy.occupy("tool"), occupancy.occupy("engine"):
            clock.advance(3.0)
            assert (occupancy.read_seconds("tool"), occupancy.read_seconds("engine")) == (8.0, 3.0)
            assert occupancy.read_count("tool") == 2
        clock.advance(1.0)
    clock.advance(100.0)
    assert (occupancy.read_seconds("tool"), occupancy.read_seconds("engine")) == (9.0, 3.0)
    assert (occupancy.read_seconds("nowhere"), occupancy.read_count("nowhere")) == (0.0, 0.0)


def test_occupancy_ends_on_an_error() -> None:
    clock = ManualClock()
    occupancy = Occupancy(clock.monotonic)
    with pytest.raises(KeyError), occupancy.occupy("tool"):
        clock.advance(1.0)
        raise KeyError
    clock.advance(1.0)
    assert occupancy.read_seconds("tool") == 1.0


def test_set_count_accumulates_from_then_and_not_during_a_pause() -> None:
    clock = ManualClock()
    job = JobClock(clock)
    occupancy = Occupancy(job.monotonic)
    occupancy.set_count("running", 3)
    clock.advance(2.0)
    occupancy.set_count("running", 1)
    clock.advance(2.0)
    job.set_paused(True)
    clock.advance(50.0)
    assert occupancy.read_seconds("running") == 8.0
    job.set_paused(False)
    clock.advance(0.5)
    assert occupancy.read_seconds("running") == 8.5
