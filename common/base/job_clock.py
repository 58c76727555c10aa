"""The clock of one job: it stands still while the planner has the job paused.

What a job is waited for counts by it: patience with engines and sandboxes, the wait for an
evaluation, the idle time of a session. What a process does for itself (leases, calls under way,
its files) counts by the process's own clock.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from meshrl.common.base.clock import Clock, LoopTimeout

POLL_S = 0.5  # while it stands: how soon a sleeper sees that it goes on


class JobClock:
    """Goes with the clock of the process, less the time for which it was held."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paused_at: float | None = None  # by the process's clock; None: it goes
        self._paused_total_s = 0.0  # in all, before
        self._deadlines: set[_JobDeadline] = set()  # that are awaited

    @property
    def is_paused(self) -> bool:
        """Whether it stands still."""
        return self._paused_at is not None

    def set_paused(self, paused: bool) -> None:
        """Stands still from now on, or goes on; nothing happens if it does already."""
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
        """Seconds for which the job was not paused; only differences mean something."""
        now = self._clock.monotonic() if self._paused_at is None else self._paused_at
        return now - self._paused_total_s

    def wall(self) -> float:
        """Seconds since the epoch, which go on."""
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds` of the job's time."""
        until = self.monotonic() + seconds
        await self._clock.sleep(seconds)
        while self.is_paused or (left := until - self.monotonic()) > 0:
            await self._clock.sleep(POLL_S if self.is_paused else left)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """Ends its block after `seconds` of the job's time with DeadlineExceeded(what)."""
        return _JobDeadline(self._deadlines, self, seconds, what)


class _JobDeadline(LoopTimeout):
    """One block's: it has none while the clock stands."""

    def __init__(
        self, active: set[_JobDeadline], clock: JobClock, seconds: float, what: str
    ) -> None:
        super().__init__(seconds, what)
        self._active, self._clock = active, clock
        self._left_s = seconds
        self._since = 0.0  # of the loop's time, when `_left_s` was left
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
        """The clock stands; one that has just passed has passed."""
        if not self._scope.expired():
            self._left_s -= asyncio.get_running_loop().time() - self._since
            self._scope.reschedule(None)

    def resume(self) -> None:
        """The clock goes, with what is left."""
        if not self._scope.expired():
            self._since = asyncio.get_running_loop().time()
            self._scope.reschedule(self._since + self._left_s)
