"""Waits for room on a full disk, and says which file needs how much."""

from __future__ import annotations

import sys
from collections.abc import Callable

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import StorageFull

LOOK_S = 0.5


class RoomForWrites:
    """Writes that wait, until they are `given_up`."""

    def __init__(self, clock: Clock, given_up: Callable[[], bool] = lambda: False) -> None:
        self._clock, self._given_up = clock, given_up
        self._said = ""

    async def write(self, write: Callable[[], None]) -> bool:
        """Writes as soon as there is room; False when it was given up."""
        while True:
            try:
                write()
                return True
            except StorageFull as error:
                if self.over(str(error)):
                    return False
            await self.wait()

    def over(self, why: str) -> bool:
        """Whether to give up; says once what is waited for."""
        if why != self._said:
            self._said = why
            print(f"waiting for room: {why}", file=sys.stderr, flush=True)
        return self._given_up()

    async def wait(self) -> None:
        """Until it is worth another try."""
        await self._clock.sleep(LOOK_S)
