"""Virtual time: an asyncio loop whose clock jumps to the next timer when nothing is ready, so that
an hour takes seconds.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from common.clock import loop_timeout
from common.errors import DeadlineExceeded
from common.random import Random

T = TypeVar("T")
EPOCH_S = 1_700_000_000.0  # where virtual wall time starts: any fixed, plausible date


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for no one: what it was asked to wait is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limit = float("inf")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise DeadlineExceeded(
                f"at {self.now:.3f} s of virtual time every task waits and no timer is set",
                fix="Some await has no deadline, or waits for a thread",
            )
        self.now += timeout
        if self.now > self.limit:
            raise DeadlineExceeded(f"more than {self.limit:g} s of virtual time")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


class VirtualClock:
    """The clock of a VirtualLoop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._time = loop.jumping

    def monotonic(self) -> float:
        return self._time.now

    def wall(self) -> float:
        return EPOCH_S + self._time.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        return loop_timeout(seconds, what)


def run_virtual(
    main: Callable[[VirtualClock, Random], Coroutine[Any, Any, T]],
    seed: int = 0,
    *,
    limit_s: float = 86_400.0,
) -> T:
    """What `main(clock, random)` returns, run to its end under virtual time. The same seed gives
    the same run.

    DeadlineExceeded when `limit_s` of virtual time have passed, or when all tasks wait for
    something that no timer ends.
    """
    loop = VirtualLoop()
    loop.jumping.limit = limit_s
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main(VirtualClock(loop), Random(seed)))
        finally:
            loop.jumping.limit = float("inf")
