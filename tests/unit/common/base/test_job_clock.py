"""Clocks of jobs that are paused, and seconds that are counted in places."""

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
from tests.unit.common.generation.engines_under_test import StandingClock

PAUSE_S = 7200.0


async def paused(clock: VirtualClock, job: JobClock, after_s: float) -> None:
    await clock.sleep(after_s)
    job.set_paused(True)
    job.set_paused(True)
    await clock.sleep(PAUSE_S)
    job.set_paused(False)


@virtual
async def test_its_time_stands_and_goes_on(clock: VirtualClock, random: Random) -> None:
    job = JobClock(clock)
    began = job.monotonic()
    pausing = asyncio.ensure_future(paused(clock, job, 10.0))
    await clock.sleep(3600.0)
    assert job.is_paused and job.monotonic() - began == pytest.approx(10.0)
    await pausing
    await clock.sleep(5.0)
    assert not job.is_paused and job.monotonic() - began == pytest.approx(15.0)


@pytest.mark.parametrize("begins_s", [0.0, 60.0], ids=["before", "meanwhile"])
def test_a_deadline_has_left_what_it_had(begins_s: float) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        job = JobClock(clock)
        pausing = asyncio.ensure_future(paused(clock, job, 30.0))
        await clock.sleep(begins_s)
        with pytest.raises(DeadlineExceeded, match="a turn took longer than 100 s"):
            async with job.timeout(100.0, "a turn"):
                await clock.sleep(PAUSE_S + 1e6)
        assert pausing.done()
        ran_before = max(0.0, 30.0 - begins_s)
        assert clock.monotonic() == pytest.approx(30.0 + PAUSE_S + 100.0 - ran_before)
        async with job.timeout(1.0, "what ends in time"):
            await clock.sleep(0.5)
        job.set_paused(True)  # deadlines that are over are not woken
        job.set_paused(False)

    run_virtual(main, limit_s=1e7)


@virtual
async def test_a_sleep_is_of_its_time(clock: VirtualClock, random: Random) -> None:
    job = JobClock(clock)
    pausing = asyncio.ensure_future(paused(clock, job, 1.0))
    await job.sleep(3.0)
    assert clock.monotonic() == pytest.approx(PAUSE_S + 3.0, abs=1.0)
    await pausing


@virtual
async def test_patience_with_a_peer_is_not_spent_and_its_wait_is_no_longer_than_it_was(
    clock: VirtualClock, random: Random
) -> None:
    job = JobClock(clock)
    pausing = asyncio.ensure_future(paused(clock, job, 5.0))

    async def action() -> bool:
        if clock.monotonic() < PAUSE_S + 100.0:
            raise PeerLost("it sleeps")
        return True

    assert await retry(job, action, interval_s=5.0, limit_s=600.0)
    await pausing


@virtual
async def test_a_wait_that_began_so_long_ago_is_published_so(
    clock: VirtualClock, random: Random
) -> None:
    waits = WaitTable(clock)
    await clock.sleep(50.0)
    with waits.wait("an engine", "engine/g0.0", waits.compute_start(20.0)):
        (told,) = waits.list_longest([])
    assert clock.wall() * 1000 - told["since_ms"] == pytest.approx(20_000, abs=1)


def test_those_who_are_there_now_count_up_to_now() -> None:
    clock = StandingClock()
    found = Occupancy(clock.monotonic)
    with found.occupy("tool"):
        clock.pass_(2.0)
        with found.occupy("tool"), found.occupy("engine"):
            clock.pass_(3.0)
            assert (found.read_seconds("tool"), found.read_seconds("engine")) == (8.0, 3.0)
            assert found.read_count("tool") == 2
        clock.pass_(1.0)
    clock.pass_(100.0)
    assert (found.read_seconds("tool"), found.read_seconds("engine")) == (9.0, 3.0)
    assert (found.read_seconds("nowhere"), found.read_count("nowhere")) == (0.0, 0.0)


def test_who_leaves_by_an_error_is_there_no_more() -> None:
    clock = StandingClock()
    found = Occupancy(clock.monotonic)
    with pytest.raises(KeyError), found.occupy("tool"):
        clock.pass_(1.0)
        raise KeyError
    clock.pass_(1.0)
    assert found.read_seconds("tool") == 1.0


def test_a_count_holds_from_when_it_was_put_and_nothing_counts_in_a_pause() -> None:
    clock = StandingClock()
    job = JobClock(clock)
    found = Occupancy(job.monotonic)
    found.set_count("running", 3)
    clock.pass_(2.0)
    found.set_count("running", 1)
    clock.pass_(2.0)
    job.set_paused(True)
    clock.pass_(50.0)
    assert found.read_seconds("running") == 8.0
    job.set_paused(False)
    clock.pass_(0.5)
    assert found.read_seconds("running") == 8.5
