"""Slots for jails of a sandbox: calls wait here for one, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Overloaded

MAX_WAITING_CALLS = 20_000  # calls; beyond them callers are rejected
MAX_WAIT_S = 900.0  # for a slot; callers have shorter deadlines


class JailSlots:
    """Bounded number of slots."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self.count = clock, count
        self._free = asyncio.Semaphore(count)
        self.busy = self.waiting = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        if self.waiting >= MAX_WAITING_CALLS:
            raise Overloaded(f"{self.waiting} calls already wait for a jail")
        self.waiting += 1
        try:
            async with self._clock.timeout(MAX_WAIT_S, "waiting for a jail"):
                await self._free.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self._free.release()
