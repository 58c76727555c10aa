"""Work slowed down to the speed of an emulated accelerator: its results are the same, its pieces
padded.

So two cores can emulate several accelerators, as long as they compute faster than those. What is
padded is what the accelerator would be busy with: whoever holds its time slice goes on holding it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.job.pace import LATE

T = TypeVar("T")


class Padding:
    """Makes work take what it would at a pace; counts what took longer by over LATE of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps, self._late = 0, 0

    @property
    def late(self) -> dict[str, int]:
        return {"paced": self._steps, "late": self._late}

    async def take(self, seconds: float, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, no sooner than after so long."""
        clock = self._clock
        began = clock.monotonic()
        found = await work()
        left_s = began + seconds - clock.monotonic()
        if left_s > 0:
            await clock.sleep(left_s)
        self._steps += 1
        self._late += clock.monotonic() - began > (1.0 + LATE) * seconds
        return found
