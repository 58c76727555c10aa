"""Virtual time: an asyncio loop whose clock jumps to the next timer when no task is ready.

So an hour takes seconds.

A callback belongs to a virtual process if its context has one. The loop parks callbacks of a
stopped process, and drops those of a dead one.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, Protocol, TypeVar

from meshrl.common.base.clock import LoopTimeout
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.random import Random

T = TypeVar("T")
WALL_EPOCH_S = 1_700_000_000.0  # start of virtual wall time: any fixed, plausible date


class TaskOwner(Protocol):
    """Virtual process, as the loop uses it."""

    is_running: bool

    def park(self, handle: asyncio.Handle) -> None:
        """Park a callback while the process is not running."""

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Add a task that started in the process."""


CURRENT_OWNER: ContextVar[TaskOwner | None] = ContextVar("owner", default=None)


class _Handle(asyncio.Handle):
    """Handle without asyncio's debug check, as a mesh creates a thousand per second."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., Any],
        args: Any,
        loop: asyncio.AbstractEventLoop,
        context: Context | None = None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class VirtualTask(asyncio.Task[Any]):
    """Task whose order in a set does not depend on its address, so a seed gives one order."""

    def __init__(self, work: Any, *, loop: VirtualLoop, context: Context | None) -> None:
        self._number = next(loop.sequence_numbers)
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _create_task(
    loop: VirtualLoop, coroutine: Any, context: Context | None = None
) -> asyncio.Task[Any]:
    owner = CURRENT_OWNER.get() if context is None else context.get(CURRENT_OWNER)
    task = VirtualTask(coroutine, loop=loop, context=context)
    if owner is not None:
        owner.add_task(task)
    return task


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with virtual time: only timers end a wait."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[tuple[float, int, asyncio.TimerHandle]]

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now_s = 0.0
        self.limit_s = float("inf")
        self.sequence_numbers = count()
        self.set_task_factory(_create_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, next(self.sequence_numbers), timer))
        return timer

    def requeue(self, handle: asyncio.Handle) -> None:
        """Requeue a parked callback."""
        if not handle.cancelled():
            self._ready.append(handle)

    def _run_once(self) -> None:
        """Run the ready callbacks, or else those of the next timer."""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0][2].cancelled():
            heapq.heappop(scheduled)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise DeadlineExceeded(
                    f"at {self.now_s:.3f} s of virtual time all tasks wait, but no timer is set",
                    fix="Find the await without a deadline, or one that waits for a thread",
                )
            self.now_s = max(self.now_s, scheduled[0][0])
            if self.now_s > self.limit_s:
                raise DeadlineExceeded(
                    f"the limit of {self.limit_s:g} s of virtual time is exceeded"
                )
        while scheduled and scheduled[0][0] <= self.now_s:
            ready.append(heapq.heappop(scheduled)[2])
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            owner = context.get(CURRENT_OWNER)
            if owner is not None and not owner.is_running:
                owner.park(handle)
                continue
            try:
                context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                error_context = {
                    "message": f"Exception in {handle._callback!r}",
                    "exception": error,
                }
                self.call_exception_handler(error_context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Ignore the cancellation: cancelled timers are removed at their time."""


class VirtualClock:
    """Clock of a VirtualLoop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now_s

    def wall(self) -> float:
        return WALL_EPOCH_S + self._loop.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        return LoopTimeout(seconds, what)


def run_virtual(
    main: Callable[[VirtualClock, Random], Coroutine[Any, Any, T]],
    seed: int = 0,
    *,
    limit_s: float = 86_400.0,
) -> T:
    """Run `main(clock, random)` to its end under virtual time, and return its result. The same seed
    gives the same run.

    Raise DeadlineExceeded after `limit_s` of virtual time, or if all tasks wait without a timer.
    """
    loop = VirtualLoop()
    loop.limit_s = limit_s
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main(VirtualClock(loop), Random(seed)))
        finally:
            loop.limit_s = float("inf")
