"""Budget of a child's restarts: counted within a time window, and by repeated cause."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.05  # seconds before the first restart; doubles with each restart in the window
LONGEST_DELAY_S = 5.0


class RestartBudget:
    """Counter of restarts against a budget of `max_restarts` in `window_s` seconds.

    The same number also limits restarts in a row by one error after runs shorter than the window. A
    child that takes seconds to fail would otherwise never exceed the budget.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._times: deque[float] = deque()
        self._cause, self._same_cause_count, self._same_cause_since = "", 0, 0.0
        self.total_restarts = 0

    def record_exit(self, cause: str, ran_s: float, now: float) -> float:
        """Record an exit; return the time in seconds since which this cause has repeated."""
        if cause != self._cause or ran_s > self._window_s:
            self._cause, self._same_cause_count, self._same_cause_since = cause, 0, now
        self._same_cause_count += 1
        return now - self._same_cause_since

    def next_delay(self, now: float) -> float | None:
        """Return the seconds to wait before a restart at `now`; None if the budget is exhausted."""
        while self._times and self._times[0] <= now - self._window_s:
            self._times.popleft()
        if len(self._times) >= self._max_restarts or self._same_cause_count > self._max_restarts:
            return None
        delay = min(FIRST_DELAY_S * 2.0 ** len(self._times), LONGEST_DELAY_S)
        self._times.append(now)
        self.total_restarts += 1
        return delay

    @property
    def exhaustion_reason(self) -> str:
        """Explain what exhausted the budget."""
        if len(self._times) >= self._max_restarts:
            return f"exited more than {self._max_restarts} times in {self._window_s:g} s"
        return f"exited {self._same_cause_count} times in a row by the same cause"

    def reset(self) -> None:
        """Reset the budget; the start of the repeated cause stays."""
        self._times.clear()
        self._same_cause_count = 0
