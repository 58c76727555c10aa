"""What happens when: events in the order of their time, and of those at one time, as they came."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class Agenda:
    """A simulation's clock, and what is due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._count = 0

    def at(self, when_s: float, act: Act) -> None:
        """Lets something happen, at once if it is late."""
        heappush(self._due, (max(when_s, self.now_s), self._count, act))
        self._count += 1

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now_s + seconds, act)

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        while self._due and not over():
            when_s, _, act = self._due[0]
            if when_s > until_s:
                self.now_s = until_s
                return
            heappop(self._due)
            self.now_s = when_s
            act()
