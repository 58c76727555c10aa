"""Waits for room on a full disk, and says which file needs how much."""

from __future__ import annotations

import sys
from collections.abc import Callable

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import StorageFull

POLL_S = 0.5


class DiskSpaceWaiter:
    """Writes that wait, until they are `given_up`."""

    def __init__(self, clock: Clock, has_given_up: Callable[[], bool] = lambda: False) -> None:
        self._clock, self._has_given_up = clock, has_given_up
        self._last_message = ""

    async def write_when_space(self, write: Callable[[], None]) -> bool:
        """Writes as soon as there is room; False when it was given up."""
        while True:
            try:
                write()
                return True
            except StorageFull as error:
                if self.should_give_up(str(error)):
                    return False
            await self.wait()

    def should_give_up(self, reason: str) -> bool:
        """Whether to give up; says once what is waited for."""
        if reason != self._last_message:
            self._last_message = reason
            print(f"waiting for room: {reason}", file=sys.stderr, flush=True)
        return self._has_given_up()

    async def wait(self) -> None:
        """Until it is worth another try."""
        await self._clock.sleep(POLL_S)
