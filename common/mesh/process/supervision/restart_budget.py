"""How often a child is started again: counted by time, and by what ends it again and again."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.05  # before the first restart; it doubles with each that the budget remembers
LONGEST_DELAY_S = 5.0


class RestartBudget:
    """Counts restarts against a budget of `most` in `within_s`, and as many in a row by the same
    error after runs that were all shorter than that: a child that takes seconds to fail would never
    be too often in any span of time.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._times: deque[float] = deque()
        self._cause, self._same_cause_count, self._same_cause_since = "", 0, 0.0
        self.total_restarts = 0

    def record_exit(self, cause: str, ran_s: float, now: float) -> float:
        """Notes an end; returns since when (seconds) this cause has ended it in a row."""
        if cause != self._cause or ran_s > self._window_s:
            self._cause, self._same_cause_count, self._same_cause_since = cause, 0, now
        self._same_cause_count += 1
        return now - self._same_cause_since

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before a restart at `now`; None when the budget is spent."""
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
        """What spent the budget, said to a person."""
        if len(self._times) >= self._max_restarts:
            return f"ended more than {self._max_restarts} times in {self._window_s:g} s"
        return f"ended {self._same_cause_count} times in a row so"

    def reset(self) -> None:
        """Begins a fresh budget; since when it ends so is kept."""
        self._times.clear()
        self._same_cause_count = 0
