"""Clock of one job: it stops while the planner has the job paused.

It measures waits for the job: timeouts of engines and sandboxes, the wait for an evaluation, the
idle time of a session. The process's own clock measures its leases, calls in progress and files.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from meshrl.common.base.clock import Clock, LoopTimeout

POLL_S = 0.5  # seconds between a sleeper's checks while the clock is stopped


class JobClock:
    """Clock of the process, less the time for which the job was paused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paused_at: float | None = None  # by the process's clock; None: not paused
        self._paused_total_s = 0.0  # total of earlier pauses
        self._deadlines: set[_JobDeadline] = set()  # active deadlines

    @property
    def is_paused(self) -> bool:
        """True while the clock is stopped."""
        return self._paused_at is not None

    def set_paused(self, paused: bool) -> None:
        """Stop or continue the clock; do nothing if it is in that state."""
        if paused == self.is_paused:
            return
        now = self._clock.monotonic()
        if self._paused_at is None:
            self._paused_at = now
        else:
            self._paused_total_s += now - self._paused_at
            self._paused_at = None
        for deadline in self._deadlines:
            deadline.pause() if paused else deadline.resume()

    def monotonic(self) -> float:
        """Return the seconds for which the job was not paused; only differences are meaningful."""
        now = self._clock.monotonic() if self._paused_at is None else self._paused_at
        return now - self._paused_total_s

    def wall(self) -> float:
        """Return the seconds since the epoch, which also advance during a pause."""
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` of the job's time."""
        until = self.monotonic() + seconds
        await self._clock.sleep(seconds)
        while self.is_paused or (remaining_s := until - self.monotonic()) > 0:
            await self._clock.sleep(POLL_S if self.is_paused else remaining_s)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """End the block after `seconds` of the job's time with DeadlineExceeded(what)."""
        return _JobDeadline(self._deadlines, self, seconds, what)


class _JobDeadline(LoopTimeout):
    """Deadline of one block, suspended while the clock is stopped."""

    def __init__(
        self, active: set[_JobDeadline], clock: JobClock, seconds: float, what: str
    ) -> None:
        super().__init__(seconds, what)
        self._active, self._clock = active, clock
        self._left_s = seconds
        self._since = 0.0  # loop time at which `_left_s` was set
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._active.add(self)
        if not self._clock.is_paused:
            self.resume()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._active.discard(self)
        await super().__aexit__(kind, error, trace)

    def pause(self) -> None:
        """Suspend the deadline when the clock stops, unless it has passed."""
        if not self._scope.expired():
            self._left_s -= asyncio.get_running_loop().time() - self._since
            self._scope.reschedule(None)

    def resume(self) -> None:
        """Resume the deadline with the remaining time."""
        if not self._scope.expired():
            self._since = asyncio.get_running_loop().time()
            self._scope.reschedule(self._since + self._left_s)
