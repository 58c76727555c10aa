"""What is done between two steps of an engine: asked for on the loop, done where it computes."""

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

BETWEEN_S = 60.0  # for what runs between two steps; with others on the gang, their turns come first


class StepCommands:
    """Commands that wait, in the order in which they were given. `deliver` runs a function on the
    loop, from wherever the engine computes.
    """

    def __init__(self, clock: Clock, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._clock, self.deliver = clock, deliver
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()  # and if it takes a turn
        self.wake = threading.Event()  # some were given

    @property
    def some(self) -> bool:
        return bool(self._waiting)

    @property
    def want_turn(self) -> bool:
        return any(needs_turn for _, needs_turn in self._waiting)

    def give(self, action: Callable[[], None], needs_turn: bool = False) -> None:
        """Runs `action` before the next step; in a turn of the gang, if it computes or moves
        tensors.
        """
        self._waiting.append((action, needs_turn))
        self.wake.set()

    def wait(self, within_s: float) -> None:
        """Until some are given, or so long: blocks the thread of whoever drives the engine."""
        self.wake.wait(within_s)
        self.wake.clear()

    def run(self, in_turn: bool) -> bool:
        """Runs them in order, without a turn up to one that needs it; whether there were any."""
        did = False
        while self._waiting and (in_turn or not self._waiting[0][1]):
            self._waiting.popleft()[0]()
            did = True
        return did

    async def between_steps(
        self,
        action: Callable[[], R],
        what: str,
        deadline_s: float = BETWEEN_S,
        *,
        needs_turn: bool = False,
    ) -> R:
        """What `action` answers between two steps; its error is raised here. It does not begin once
        nobody waits for it any more.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                answer = action()
            except MeshError as error:
                self.deliver(partial(_settle, done, error))
            else:
                self.deliver(partial(_settle, done, answer))

        self.give(run, needs_turn)
        async with self._clock.timeout(deadline_s, what):
            return await done


def _settle(done: asyncio.Future[Any], answer: Any) -> None:
    if done.cancelled():
        return
    if isinstance(answer, MeshError):
        done.set_exception(answer)
    else:
        done.set_result(answer)
