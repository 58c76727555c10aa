"""The clock of one job: it stands still while the planner has the job paused.

What a job is waited for counts by it: patience with engines and sandboxes, the wait for an
evaluation, the idle time of a session. What a process does for itself (leases, calls under way,
its files) counts by the process's own clock.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from meshrl.common.base.clock import Clock, LoopTimeout

LOOK_S = 0.5  # while it stands: how soon a sleeper sees that it goes on


class JobClock:
    """Goes with the clock of the process, less the time for which it was held."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held_at: float | None = None  # by the process's clock; None: it goes
        self._stood_s = 0.0  # in all, before
        self._deadlines: set[_Deadline] = set()  # that are awaited

    @property
    def held(self) -> bool:
        """Whether it stands still."""
        return self._held_at is not None

    def hold(self, held: bool) -> None:
        """Stands still from now on, or goes on; nothing happens if it does already."""
        if held == self.held:
            return
        now = self._clock.monotonic()
        if self._held_at is None:
            self._held_at = now
        else:
            self._stood_s += now - self._held_at
            self._held_at = None
        for deadline in self._deadlines:
            deadline.stand() if held else deadline.go_on()

    def monotonic(self) -> float:
        """Seconds for which the job was not paused; only differences mean something."""
        now = self._clock.monotonic() if self._held_at is None else self._held_at
        return now - self._stood_s

    def wall(self) -> float:
        """Seconds since the epoch, which go on."""
        return self._clock.wall()

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds` of the job's time."""
        until = self.monotonic() + seconds
        await self._clock.sleep(seconds)
        while self.held or (left := until - self.monotonic()) > 0:
            await self._clock.sleep(LOOK_S if self.held else left)

    def timeout(self, seconds: float, what: str) -> AbstractAsyncContextManager[None]:
        """Ends its block after `seconds` of the job's time with DeadlineExceeded(what)."""
        return _Deadline(self._deadlines, self, seconds, what)


class _Deadline(LoopTimeout):
    """One block's: it has none while the clock stands."""

    def __init__(
        self, open_now: set[_Deadline], clock: JobClock, seconds: float, what: str
    ) -> None:
        super().__init__(seconds, what)
        self._open_now, self._clock = open_now, clock
        self._left_s = seconds
        self._since = 0.0  # of the loop's time, when `_left_s` was left
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._open_now.add(self)
        if not self._clock.held:
            self.go_on()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._open_now.discard(self)
        await super().__aexit__(kind, error, trace)

    def stand(self) -> None:
        """The clock stands; one that has just passed has passed."""
        if not self._scope.expired():
            self._left_s -= asyncio.get_running_loop().time() - self._since
            self._scope.reschedule(None)

    def go_on(self) -> None:
        """The clock goes, with what is left."""
        if not self._scope.expired():
            self._since = asyncio.get_running_loop().time()
            self._scope.reschedule(self._since + self._left_s)
