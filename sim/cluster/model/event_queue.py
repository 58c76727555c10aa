"""Queue of events in the order of their time, then of their insertion."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class EventQueue:
    """Clock of a simulation, with its pending events."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._pending: list[tuple[float, int, Action]] = []
        self._count = 0

    def schedule_at(self, when_s: float, action: Action) -> None:
        """Schedule an action, immediately if its time has passed."""
        heappush(self._pending, (max(when_s, self.now_s), self._count, action))
        self._count += 1

    def schedule_after(self, seconds: float, action: Action) -> None:
        self.schedule_at(self.now_s + seconds, action)

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        while self._pending and not is_over():
            when_s, _, act = self._pending[0]
            if when_s > until_s:
                self.now_s = until_s
                return
            heappop(self._pending)
            self.now_s = when_s
            act()
