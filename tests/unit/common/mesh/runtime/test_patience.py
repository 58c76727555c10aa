"""Repeated, batched and serial work: bounded, named, and over before the next begins."""

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

SOON_S = 30.0  # for a thread of a busy machine to get its turn


async def gave_up(clock: Clock, *errors: MeshError, for_s: float = OUTAGE_LIMIT_S) -> float:
    """After how long an action is given up that fails by these errors in turn, for ever."""
    began, tries = clock.monotonic(), 0

    async def fails() -> None:
        nonlocal tries
        tries += 1
        raise errors[tries % len(errors)]

    with pytest.raises(MeshError):
        await retry(clock, fails, interval_s=5.0, limit_s=for_s)
    return clock.monotonic() - began


@virtual
async def test_an_outage_is_waited_out_for_longer_than_a_peer(
    clock: VirtualClock, random: Random
) -> None:
    assert await gave_up(clock, StateUnavailable("x")) == pytest.approx(OUTAGE_LIMIT_S, abs=6.0)
    assert await gave_up(clock, StorageFull("x")) == pytest.approx(OUTAGE_LIMIT_S, abs=6.0)
    assert await gave_up(clock, PeerLost("x")) == pytest.approx(PEER_LIMIT_S, abs=6.0)
    assert await gave_up(clock, PeerLost("x"), for_s=60.0) == pytest.approx(60.0, abs=6.0)
    assert await gave_up(clock, Refused("x")) == 0.0


@virtual
async def test_a_peer_has_its_time_anew_after_an_outage(
    clock: VirtualClock, random: Random
) -> None:
    both = await gave_up(clock, PeerLost("x"), StateUnavailable("x"))
    assert both == pytest.approx(OUTAGE_LIMIT_S, abs=12.0)


@virtual
async def test_a_loop_that_goes_on_after_errors_ends_by_one_that_does_not_pass(
    clock: VirtualClock, random: Random
) -> None:
    patience = RetryPolicy(clock)
    for _ in range(100):
        patience.record_failure(Refused("x"))
        await clock.sleep(PERMANENT_ERROR_LIMIT_S - 1.0)
        patience.record_success()
    patience.record_failure(Refused("x"))
    await clock.sleep(PERMANENT_ERROR_LIMIT_S + 1.0)
    with pytest.raises(Refused):
        patience.record_failure(Refused("x"))


@virtual
async def test_whom_it_waits_for_is_on_record_until_it_succeeds(
    clock: VirtualClock, random: Random
) -> None:
    waits = WaitTable(clock)
    CURRENT_WAITS.set(waits)
    tries = 0
    seen = []

    async def third() -> int:
        nonlocal tries
        tries += 1
        seen.append([(wait["on"], wait["what"]) for wait in waits.list_longest([])])
        if tries < 3:
            raise StorageFull("no room for a chunk", where="/runs/a")
        return tries

    assert await retry(clock, third, interval_s=1.0) == 3
    full = ("disk", "room (at /runs/a): no room for a chunk")
    assert seen == [[], [full], [full]] and waits.list_longest([]) == []
    assert describe_wait(PeerLost("gone", where="weights"))[1] == "weights"
    assert describe_wait(StateUnavailable("Redis refuses writes: MISCONF"))[1] == "redis"


async def test_a_close_sends_nothing_more_and_leaves_no_future_pending() -> None:
    sent: list[list[int]] = []

    async def send(batch: list[int]) -> list[int | Exception]:
        sent.append(batch)
        await asyncio.sleep(60.0)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send, max_batch_size=2)
    futures = [batcher.submit(number) for number in range(6)]
    await asyncio.sleep(0.01)
    await batcher.close()
    await asyncio.sleep(0.01)
    assert sent == [[0, 1]]
    assert all(future.cancelled() for future in futures)


async def test_a_close_before_a_batch_has_begun_leaves_no_future_pending() -> None:
    async def send(batch: list[int]) -> list[int | Exception]:
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send)
    future = batcher.submit(1)
    batcher._send_batches()
    await batcher.close()
    assert future.cancelled()


async def test_a_request_whose_future_is_cancelled_is_not_sent() -> None:
    sent: list[int] = []

    async def send(batch: list[int]) -> list[int | Exception]:
        sent.extend(batch)
        await asyncio.sleep(0.01)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(send, max_batch_size=1)
    futures = [batcher.submit(number) for number in range(3)]
    await asyncio.sleep(0)
    futures[1].cancel()
    assert (await futures[0], await futures[2]) == (0, 2)
    assert sent == [0, 2]


class Exited(BaseException):
    pass


class Host(SystemHost):
    """Real threads; an exit that can be looked at."""

    def exit(
        self, code: int, why: str, error: BaseException | None = None, job: str = ""
    ) -> NoReturn:
        raise Exited(code)


class Piece:
    """Work that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go, self.over = Event(), Event(), Event()

    def __call__(self, answer: Any = None) -> Any:
        self.begun.set()
        assert self.let_go.wait(scaled(SOON_S))
        self.over.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def until(event: Event) -> None:
    assert await asyncio.to_thread(event.wait, scaled(SOON_S))


@asynccontextmanager
async def serial_executor(patience_s: float | None = None) -> AsyncIterator[SerialExecutor]:
    clock = SystemClock()
    mesh = alone("trainer/j", clock, Random(0), Host())
    yield SerialExecutor(mesh, patience_s or scaled(SOON_S))


@pytest.mark.parametrize("answer", ["unheard", ValueError("unheard")])
async def test_a_piece_whose_caller_has_gone_is_over_before_the_next_begins(answer: Any) -> None:
    async with serial_executor() as thread:
        left = Piece()
        caller = asyncio.create_task(thread.run(left, answer, deadline_s=scaled(SOON_S)))
        await until(left.begun)
        await cancel(caller)
        following = asyncio.create_task(thread.run(left.over.is_set, deadline_s=scaled(SOON_S)))
        await asyncio.to_thread(left.let_go.set)
        assert await following, "it began beside the piece before it"


async def test_a_piece_past_its_deadline_is_over_before_the_next_begins() -> None:
    async with serial_executor() as thread:
        late = Piece()
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.05 s"):
            await thread.run(late, deadline_s=0.05)
        following = asyncio.create_task(thread.run(late.over.is_set, deadline_s=scaled(SOON_S)))
        await until(late.begun)
        late.let_go.set()
        assert await following


async def test_a_piece_that_does_not_end_ends_the_process() -> None:
    async with serial_executor(patience_s=0.05) as thread:
        stuck, nothing = Piece(), Piece()
        with pytest.raises(DeadlineExceeded):
            await thread.run(stuck, deadline_s=0.05)
        with pytest.raises(Exited, match=str(STUCK_EXIT_STATUS)):
            await thread.run(nothing, deadline_s=scaled(SOON_S))
        assert not nothing.begun.is_set()
        stuck.let_go.set()


async def test_answers_and_errors_are_the_works() -> None:
    def fails() -> None:
        raise ValueError("wrong")

    add: Callable[[int, int], int] = int.__add__
    async with serial_executor() as thread:
        assert await thread.run(add, 1, 2, deadline_s=scaled(SOON_S)) == 3
        with pytest.raises(ValueError, match="wrong"):
            await thread.run(fails, deadline_s=scaled(SOON_S))
        assert await thread.run(add, 3, 4, deadline_s=scaled(SOON_S)) == 7
