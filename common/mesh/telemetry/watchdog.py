"""Watchdog of the event loop: its lag is a metric, and a process with a blocked loop counts as
dead.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from meshrl.common.base.clock import Clock

TICK_S = 0.5
LOADING_LIMIT_S = 300.0  # seconds; reading a large model may block the loop this long


class Watchdog:
    """Watchdog that ticks on the loop; the renewal thread calls `explain_stall`."""

    def __init__(self, clock: Clock, stall_limit_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_limit_s
        self._loading = 0
        self._ticked = clock.monotonic()
        self.lag_s = 0.0

    async def next_tick(self) -> None:
        """Sleep one interval and record the lag of the loop."""
        due = self._clock.monotonic() + TICK_S
        await self._clock.sleep(TICK_S)
        now = self._clock.monotonic()
        self.lag_s = max(now - due, 0.0)
        self._ticked = now

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Allow the loop to block for 300 s within this block."""
        self._loading += 1
        try:
            yield
        finally:
            self._ticked = self._clock.monotonic()
            self._loading -= 1

    @property
    def stalled_for_s(self) -> float:
        """Seconds for which the loop has not run, beyond its interval."""
        return max(0.0, self._clock.monotonic() - self._ticked - TICK_S)

    @property
    def current_lag_s(self) -> float:
        """Seconds of the loop's lag at its last tick or now."""
        return max(self.lag_s, self.stalled_for_s)

    def explain_stall(self, starting: bool = False) -> str:
        """Explain why this process counts as hung; empty while its loop runs.

        Without ticks while it is `starting`, it may take as long as loading.
        """
        silent_s = self._clock.monotonic() - self._ticked
        allowed_s = (
            max(self._stall_s, LOADING_LIMIT_S) if self._loading or starting else self._stall_s
        )
        if silent_s <= allowed_s:
            return ""
        return f"the event loop has not run for {silent_s:.1f} s; the limit is {allowed_s:g} s"


def dump_stacks(why: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """Print every thread's stack and every task's stack to the real stderr."""
    err = sys.__stderr__
    if err is None:
        return
    print(f"{why}; all stacks follow", file=err, flush=True)
    faulthandler.dump_traceback(file=err, all_threads=True)
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        task.print_stack(limit=4, file=err)
    err.flush()
