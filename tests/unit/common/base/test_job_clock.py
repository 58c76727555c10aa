"""A job that is paused for two hours finds every deadline and every patience as it was before."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.errors import DeadlineExceeded, PeerLost
from meshrl.common.base.job_clock import JobClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.sim.loop import VirtualClock, run_virtual

PAUSE_S = 7200.0


async def paused(clock: VirtualClock, job: JobClock, after_s: float) -> None:
    await clock.sleep(after_s)
    job.hold(True)
    job.hold(True)
    await clock.sleep(PAUSE_S)
    job.hold(False)


def test_its_time_stands_and_goes_on() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        job = JobClock(clock)
        began = job.monotonic()
        pausing = asyncio.ensure_future(paused(clock, job, 10.0))
        await clock.sleep(3600.0)
        assert job.held and job.monotonic() - began == pytest.approx(10.0)
        await pausing
        await clock.sleep(5.0)
        assert not job.held and job.monotonic() - began == pytest.approx(15.0)

    run_virtual(main)


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
        job.hold(True)  # deadlines that are over are not woken
        job.hold(False)

    run_virtual(main, limit_s=1e7)


def test_a_sleep_is_of_its_time() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        job = JobClock(clock)
        pausing = asyncio.ensure_future(paused(clock, job, 1.0))
        await job.sleep(3.0)
        assert clock.monotonic() == pytest.approx(PAUSE_S + 3.0, abs=1.0)
        await pausing

    run_virtual(main)


def test_patience_with_a_peer_is_not_spent_and_its_wait_is_no_longer_than_it_was() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        job = JobClock(clock)
        pausing = asyncio.ensure_future(paused(clock, job, 5.0))

        async def action() -> bool:
            if clock.monotonic() < PAUSE_S + 100.0:
                raise PeerLost("it sleeps")
            return True

        assert await patiently(job, action, every_s=5.0, for_s=600.0)
        await pausing

    run_virtual(main)


def test_a_wait_that_began_so_long_ago_is_published_so() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        waits = WaitTable(clock)
        await clock.sleep(50.0)
        with waits.wait("an engine", "engine/g0.0", waits.began(20.0)):
            (told,) = waits.published([])
        assert clock.wall() * 1000 - told["since_ms"] == pytest.approx(20_000, abs=1)

    run_virtual(main)
