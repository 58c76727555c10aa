"""Retried, batched and serial work: bounded, described and never overlapping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Event
from typing import Any, NoReturn

import pytest

from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    MeshError,
    PeerLost,
    Refused,
    StateUnavailable,
    StillStarting,
    StorageFull,
)
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.common.mesh.runtime.retry_policy import (
    CURRENT_WAITS,
    OUTAGE_LIMIT_S,
    PEER_LIMIT_S,
    PERMANENT_ERROR_LIMIT_S,
    RetryPolicy,
    describe_wait,
    retry,
)
from meshrl.common.mesh.runtime.serial_executor import STUCK_EXIT_STATUS, SerialExecutor
from meshrl.sim.virtual_loop import VirtualClock
from tests.load import scaled
from tests.meshes import alone
from tests.simulated_host import virtual
from tests.unit.common.mesh.runtime.talking import cancel

SOON_S = 30.0  # for a thread on a busy machine to be scheduled


async def measure_retry_s(clock: Clock, *errors: MeshError, for_s: float = OUTAGE_LIMIT_S) -> float:
    """Return how long `retry` repeats an action that always fails by these errors in turn."""
    start_s, tries = clock.monotonic(), 0

    async def raise_next() -> None:
        nonlocal tries
        tries += 1
        raise errors[tries % len(errors)]

    with pytest.raises(MeshError):
        await retry(clock, raise_next, interval_s=5.0, limit_s=for_s)
    return clock.monotonic() - start_s


@virtual
async def test_outage_is_retried_for_longer_than_a_lost_peer(
    clock: VirtualClock, random: Random
) -> None:
    assert await measure_retry_s(clock, StateUnavailable("x")) == pytest.approx(
        OUTAGE_LIMIT_S, abs=6.0
    )
    assert await measure_retry_s(clock, StorageFull("x")) == pytest.approx(OUTAGE_LIMIT_S, abs=6.0)
    assert await measure_retry_s(clock, PeerLost("x")) == pytest.approx(PEER_LIMIT_S, abs=6.0)
    assert await measure_retry_s(clock, PeerLost("x"), for_s=60.0) == pytest.approx(60.0, abs=6.0)
    assert await measure_retry_s(clock, Refused("x")) == 0.0


@virtual
async def test_outage_resets_the_limit_for_a_lost_peer(clock: VirtualClock, random: Random) -> None:
    retry_s = await measure_retry_s(clock, PeerLost("x"), StateUnavailable("x"))
    assert retry_s == pytest.approx(OUTAGE_LIMIT_S, abs=12.0)


@virtual
async def test_policy_raises_a_permanent_error_after_its_limit(
    clock: VirtualClock, random: Random
) -> None:
    policy = RetryPolicy(clock)
    for _ in range(100):
        policy.record_failure(Refused("x"))
        await clock.sleep(PERMANENT_ERROR_LIMIT_S - 1.0)
        policy.record_success()
    policy.record_failure(Refused("x"))
    await clock.sleep(PERMANENT_ERROR_LIMIT_S + 1.0)
    with pytest.raises(Refused):
        policy.record_failure(Refused("x"))


@virtual
async def test_start_in_progress_has_no_limit_and_is_no_failure(
    clock: VirtualClock, random: Random
) -> None:
    waits = WaitTable(clock)
    CURRENT_WAITS.set(waits)
    policy = RetryPolicy(clock)
    for _ in range(10):
        policy.record_failure(StillStarting("capturing graphs"))
        await clock.sleep(OUTAGE_LIMIT_S / 5)
    [wait] = waits.list_longest([])
    assert "capturing graphs" in wait["what"]
    policy.record_failure(PeerLost("x"))  # the first failure
    await clock.sleep(PEER_LIMIT_S + 1.0)
    policy.record_failure(StillStarting("capturing graphs"))
    with pytest.raises(PeerLost):  # failed starts are limited
        policy.record_failure(PeerLost("x"))
    policy.record_failure(StillStarting("capturing graphs"))
    policy.record_success()
    assert waits.list_longest([]) == []


@virtual
async def test_retry_records_its_wait_until_it_succeeds(
    clock: VirtualClock, random: Random
) -> None:
    waits = WaitTable(clock)
    CURRENT_WAITS.set(waits)
    tries = 0
    waits_per_try = []

    async def succeed_at_third_try() -> int:
        nonlocal tries
        tries += 1
        waits_per_try.append([(wait["on"], wait["what"]) for wait in waits.list_longest([])])
        if tries < 3:
            raise StorageFull("no room for a chunk", where="/runs/a")
        return tries

    assert await retry(clock, succeed_at_third_try, interval_s=1.0) == 3
    full = ("disk", "disk space (at /runs/a): no room for a chunk")
    assert waits_per_try == [[], [full], [full]] and waits.list_longest([]) == []
    assert describe_wait(PeerLost("gone", where="weights"))[1] == "weights"
    assert describe_wait(StateUnavailable("Redis rejects writes: MISCONF"))[1] == "redis"


async def test_batcher_close_cancels_unsent_requests() -> None:
    sent_batches: list[list[int]] = []

    async def send(batch: list[int]) -> list[int | Exception]:
        sent_batches.append(batch)
        await asyncio.sleep(60.0)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send, max_batch_size=2)
    futures = [batcher.submit(number) for number in range(6)]
    await asyncio.sleep(0.01)
    await batcher.close()
    await asyncio.sleep(0.01)
    assert sent_batches == [[0, 1]]
    assert all(future.cancelled() for future in futures)


async def test_batcher_close_before_a_batch_starts_cancels_its_futures() -> None:
    async def send(batch: list[int]) -> list[int | Exception]:
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send)
    future = batcher.submit(1)
    batcher._send_batches()
    await batcher.close()
    assert future.cancelled()


async def test_batcher_skips_a_cancelled_request() -> None:
    sent_numbers: list[int] = []

    async def send(batch: list[int]) -> list[int | Exception]:
        sent_numbers.extend(batch)
        await asyncio.sleep(0.01)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send, max_batch_size=1)
    futures = [batcher.submit(number) for number in range(3)]
    await asyncio.sleep(0)
    futures[1].cancel()
    assert (await futures[0], await futures[2]) == (0, 2)
    assert sent_numbers == [0, 2]


class Exited(BaseException):
    pass


class Host(SystemHost):
    """Host with real threads whose exit raises an exception."""

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        raise Exited(code)


class Work:
    """Work that lasts until it is released."""

    def __init__(self) -> None:
        self.started, self.may_finish, self.finished = Event(), Event(), Event()

    def __call__(self, answer: Any = None) -> Any:
        self.started.set()
        assert self.may_finish.wait(scaled(SOON_S))
        self.finished.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def wait_for(event: Event) -> None:
    assert await asyncio.to_thread(event.wait, scaled(SOON_S))


@asynccontextmanager
async def serial_executor(stuck_limit_s: float | None = None) -> AsyncIterator[SerialExecutor]:
    clock = SystemClock()
    mesh = alone("trainer/j", clock, Random(0), Host())
    yield SerialExecutor(mesh, stuck_limit_s or scaled(SOON_S))


@pytest.mark.parametrize("answer", ["unheard", ValueError("unheard")])
async def test_work_of_a_cancelled_caller_finishes_before_the_next_starts(answer: Any) -> None:
    async with serial_executor() as thread:
        abandoned = Work()
        caller = asyncio.create_task(thread.run(abandoned, answer, deadline_s=scaled(SOON_S)))
        await wait_for(abandoned.started)
        await cancel(caller)
        following = asyncio.create_task(
            thread.run(abandoned.finished.is_set, deadline_s=scaled(SOON_S))
        )
        await asyncio.to_thread(abandoned.may_finish.set)
        assert await following, "it began beside the piece before it"


async def test_work_past_its_deadline_finishes_before_the_next_starts() -> None:
    async with serial_executor() as thread:
        late = Work()
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.05 s"):
            await thread.run(late, deadline_s=0.05)
        following = asyncio.create_task(thread.run(late.finished.is_set, deadline_s=scaled(SOON_S)))
        await wait_for(late.started)
        late.may_finish.set()
        assert await following


async def test_stuck_work_ends_the_process() -> None:
    async with serial_executor(stuck_limit_s=0.05) as thread:
        stuck, never_started = Work(), Work()
        with pytest.raises(DeadlineExceeded):
            await thread.run(stuck, deadline_s=0.05)
        with pytest.raises(Exited, match=str(STUCK_EXIT_STATUS)):
            await thread.run(never_started, deadline_s=scaled(SOON_S))
        assert not never_started.started.is_set()
        stuck.may_finish.set()


async def test_results_and_errors_of_work_reach_the_caller() -> None:
    def raise_error() -> None:
        raise ValueError("wrong")

    add: Callable[[int, int], int] = int.__add__
    async with serial_executor() as thread:
        assert await thread.run(add, 1, 2, deadline_s=scaled(SOON_S)) == 3
        with pytest.raises(ValueError, match="wrong"):
            await thread.run(raise_error, deadline_s=scaled(SOON_S))
        assert await thread.run(add, 3, 4, deadline_s=scaled(SOON_S)) == 7
