"""The slots for jails of a sandbox: calls wait here for one, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.base.clock import Clock
from common.base.errors import Overloaded

WAITING_MOST = 20_000  # calls; beyond them callers are refused
WAIT_S = 900.0  # for a slot; callers have shorter deadlines


class JailSlots:
    """A bounded number of them."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self.count = clock, count
        self._queue: deque[asyncio.Future[None]] = deque()
        self.busy = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self.take()
        try:
            yield
        finally:
            self.release()

    async def take(self) -> None:
        if self.waiting >= WAITING_MOST:
            raise Overloaded(f"{self.waiting} calls wait for a jail already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._give()
        try:
            async with self._clock.timeout(WAIT_S, "the wait for a jail"):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it had just been given one
                self.release()
            else:
                turn.cancel()
                if turn in self._queue:
                    self._queue.remove(turn)
            raise

    def release(self) -> None:
        self.busy -= 1
        self._give()

    def _give(self) -> None:
        while self._queue and self.busy < self.count:
            turn = self._queue.popleft()
            if not turn.done():
                self.busy += 1
                turn.set_result(None)
