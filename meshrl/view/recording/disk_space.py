"""Waiter for space on a full disk, which prints the file and the bytes that it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import StorageFull

POLL_S = 0.5


class DiskSpaceWaiter:
    """Waiter for disk space, until its `has_given_up` returns True."""

    def __init__(self, clock: Clock, has_given_up: Callable[[], bool] = lambda: False) -> None:
        self._clock, self._has_given_up = clock, has_given_up
        self._last_message = ""

    async def write_when_space(self, write: Callable[[], None]) -> bool:
        """Write as soon as there is space; return False when the wait was given up."""
        while True:
            try:
                write()
                return True
            except StorageFull as error:
                if self.should_give_up(str(error)):
                    return False
            await self.wait()

    def should_give_up(self, reason: str) -> bool:
        """Return True to give up; print once what is waited for."""
        if reason != self._last_message:
            self._last_message = reason
            print(f"waiting for disk space: {reason}", file=sys.stderr, flush=True)
        return self._has_given_up()

    async def wait(self) -> None:
        """Wait until another try makes sense."""
        await self._clock.sleep(POLL_S)
