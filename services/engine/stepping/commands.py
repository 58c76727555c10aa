"""Commands that the loop queues and the engine's thread runs between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError

R = TypeVar("R")

BETWEEN_STEPS_TIMEOUT_S = (
    60.0  # for a command between two steps; time slices of other instances may come first
)


class StepCommands:
    """Queue of commands in their order.

    `call_on_loop` runs a function on the loop, from wherever the engine computes.
    """

    def __init__(self, clock: Clock, call_on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._clock, self.call_on_loop = clock, call_on_loop
        # command, and True if it needs a time slice
        self._queue: deque[tuple[Callable[[], None], bool]] = deque()
        self.wake_event = threading.Event()  # set when commands are queued

    @property
    def has_commands(self) -> bool:
        return bool(self._queue)

    @property
    def needs_slice(self) -> bool:
        return any(needs_turn for _, needs_turn in self._queue)

    def enqueue(
        self, action: Callable[[], None], needs_slice: bool = False, *, is_first: bool = False
    ) -> None:
        """Queue `action` for the next step; `needs_slice` if it computes with the tensors.

        `is_first`: before all others, because a time slice that they need waits for it.
        """
        if is_first:
            self._queue.appendleft((action, needs_slice))
        else:
            self._queue.append((action, needs_slice))
        self.wake_event.set()

    def wait(self, timeout_s: float) -> None:
        """Block the driver's thread until commands are queued or `timeout_s` has passed."""
        self.wake_event.wait(timeout_s)
        self.wake_event.clear()

    def run(self, in_slice: bool) -> bool:
        """Run commands in order; without a time slice, stop at the first one that needs it.

        Return True if any command ran.
        """
        did = False
        while self._queue and (in_slice or not self._queue[0][1]):
            self._queue.popleft()[0]()
            did = True
        return did

    async def run_between_steps(
        self,
        action: Callable[[], R],
        what: str,
        deadline_s: float = BETWEEN_STEPS_TIMEOUT_S,
        *,
        needs_slice: bool = False,
        is_first: bool = False,
    ) -> R:
        """Run `action` between two steps and return its result, or raise its error here.

        The action does not start once the caller no longer waits.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                answer = action()
            except (MeshError, MemoryError) as error:
                self.call_on_loop(partial(_resolve, done, error))
            else:
                self.call_on_loop(partial(_resolve, done, answer))

        self.enqueue(run, needs_slice, is_first=is_first)
        async with self._clock.timeout(deadline_s, what):
            return await done


def _resolve(done: asyncio.Future[Any], answer: Any) -> None:
    if done.cancelled():
        return
    if isinstance(answer, MeshError | MemoryError):
        done.set_exception(answer)
    else:
        done.set_result(answer)
