"""Single timer for all deadlines of a process: set to the soonest, it checks every row when it
fires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

NEVER = float("inf")
RESOLUTION_S = 0.01  # closer deadlines share one check
PROBE_INTERVAL_S = 5.0  # between two probes of a long call, or of a stream's consumer


class DeadlineTimer:
    """Timer of deadlines; `now` is their clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._due_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: list[Callable[[float], float]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Bind the timer to the running loop."""
        self._loop = asyncio.get_running_loop()

    def add_callback(self, expire: Callable[[float], float]) -> None:
        """Add `expire(now)`, which ends rows that are due and returns the soonest remaining
        deadline.
        """
        self._callbacks.append(expire)

    def schedule(self, deadline: float) -> None:
        """Schedule a check at `deadline`."""
        if deadline >= self._due_at:
            return
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = deadline
        delay = max(deadline - self._now(), 0.0) + RESOLUTION_S
        self._timer = self._loop.call_later(delay, self._run)

    def _run(self) -> None:
        self._timer, self._due_at = None, NEVER
        now = self._now()
        soonest = min(expire(now) for expire in self._callbacks)
        if soonest < NEVER:
            self.schedule(soonest)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
