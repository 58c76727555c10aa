"""Work in one thread: what nobody waits for any more is over before the next piece begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Event
from typing import Any, NoReturn

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.serial_executor import STUCK, SerialExecutor
from tests.load import scaled
from tests.meshes import alone

SOON_S = 30.0  # for a thread of a busy machine to get its turn


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
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
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
        with pytest.raises(Exited, match=str(STUCK)):
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
