"""The watchdog of the event loop: its lag is a metric, and a process whose loop stands still must
not look alive.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from meshrl.common.base.clock import Clock

TICK_S = 0.5
LOADING_LIMIT_S = 300.0  # reading a large model may hold the loop this long


class Watchdog:
    """Ticks on the loop; `stalled()` is asked from the renewal thread."""

    def __init__(self, clock: Clock, stall_limit_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_limit_s
        self._loading = 0
        self._ticked = clock.monotonic()
        self.lag_s = 0.0

    async def next_tick(self) -> None:
        """Sleeps one interval and notes by how much the loop was late."""
        due = self._clock.monotonic() + TICK_S
        await self._clock.sleep(TICK_S)
        now = self._clock.monotonic()
        self.lag_s = max(now - due, 0.0)
        self._ticked = now

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within this block the loop may stand still for 300 s."""
        self._loading += 1
        try:
            yield
        finally:
            self._ticked = self._clock.monotonic()
            self._loading -= 1

    @property
    def stalled_for_s(self) -> float:
        """Seconds for which the loop has not run now, beyond its interval."""
        return max(0.0, self._clock.monotonic() - self._ticked - TICK_S)

    @property
    def current_lag_s(self) -> float:
        """Seconds by which the loop was late at its last tick, or is now."""
        return max(self.lag_s, self.stalled_for_s)

    def explain_stall(self, starting: bool = False) -> str:
        """Why this process must count as hung; empty while its loop runs. Nothing ticks while it
        is `starting`: it may take as long as loading.
        """
        silent_s = self._clock.monotonic() - self._ticked
        allowed_s = (
            max(self._stall_s, LOADING_LIMIT_S) if self._loading or starting else self._stall_s
        )
        if silent_s <= allowed_s:
            return ""
        return f"the event loop has not run for {silent_s:.1f} s; {allowed_s:g} are allowed"


def dump_stacks(why: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """Every thread's stack and every task's place, on the real stderr."""
    err = sys.__stderr__
    if err is None:
        return
    print(f"{why}; all stacks follow", file=err, flush=True)
    faulthandler.dump_traceback(file=err, all_threads=True)
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        task.print_stack(limit=4, file=err)
    err.flush()
