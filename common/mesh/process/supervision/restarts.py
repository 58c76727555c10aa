"""How often a child is started again: counted by time, and by what ends it again and again."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.05  # before the first restart; it doubles with each that the budget remembers
LONGEST_DELAY_S = 5.0


class Restarts:
    """Counts restarts against a budget of `most` in `within_s`, and as many in a row by the same
    error after runs that were all shorter than that: a child that takes seconds to fail would never
    be too often in any span of time.
    """

    def __init__(self, most: int, within_s: float) -> None:
        self._most, self._within_s = most, within_s
        self._times: deque[float] = deque()
        self._cause, self._same, self._since = "", 0, 0.0
        self.total = 0

    def ended(self, cause: str, ran_s: float, now: float) -> float:
        """Notes an end; returns since when (seconds) this cause has ended it in a row."""
        if cause != self._cause or ran_s > self._within_s:
            self._cause, self._same, self._since = cause, 0, now
        self._same += 1
        return now - self._since

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before a restart at `now`; None when the budget is spent."""
        while self._times and self._times[0] <= now - self._within_s:
            self._times.popleft()
        if len(self._times) >= self._most or self._same > self._most:
            return None
        delay = min(FIRST_DELAY_S * 2.0 ** len(self._times), LONGEST_DELAY_S)
        self._times.append(now)
        self.total += 1
        return delay

    @property
    def spent(self) -> str:
        """What spent the budget, said to a person."""
        if len(self._times) >= self._most:
            return f"ended more than {self._most} times in {self._within_s:g} s"
        return f"ended {self._same} times in a row so"

    def forget(self) -> None:
        """Begins a fresh budget; since when it ends so is kept."""
        self._times.clear()
        self._same = 0
