"""The slots for jails: calls wait here for one, each job in a queue of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.clock import Clock
from common.errors import Overloaded
from services.sandbox.isolation.fair_shares import chosen

WAITING_MOST = 20_000  # calls of a job; beyond them callers are refused
WAIT_S = 900.0  # for a slot; callers have shorter deadlines


class JailSlots:
    """A bounded number of them, given out by `fair.chosen`."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self.count = clock, count
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the last turn
        self._running: dict[str, int] = {}
        self.jobs = 1  # loaded jobs, whether they ask for slots or not

    @property
    def busy(self) -> int:
        return sum(self._running.values())

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @asynccontextmanager
    async def of(self, job: str) -> AsyncIterator[None]:
        await self.take(job)
        try:
            yield
        finally:
            self.release(job)

    async def take(self, job: str) -> None:
        queue = self._queues.setdefault(job, deque())
        if len(queue) >= WAITING_MOST:
            raise Overloaded(f"{len(queue)} calls of job {job} wait for a jail already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._give()
        try:
            async with self._clock.timeout(WAIT_S, f"the wait of job {job} for a jail"):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it had just been given one
                self.release(job)
            else:
                turn.cancel()
                if turn in queue:
                    queue.remove(turn)
            raise

    def release(self, job: str) -> None:
        self._running[job] -= 1
        if not self._running[job]:
            del self._running[job]
        self._give()

    def _give(self) -> None:
        while True:
            waiting = [job for job, queue in self._queues.items() if queue]
            job = chosen(waiting, self._running, self.count, max(self.jobs, len(waiting)))
            if not job:
                return
            queue = self._queues.pop(job)
            turn = queue.popleft()
            if queue:
                self._queues[job] = queue  # behind the others
            if not turn.done():
                self._running[job] = self._running.get(job, 0) + 1
                turn.set_result(None)
