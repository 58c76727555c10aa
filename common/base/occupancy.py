"""Counts of objects in each of some states, integrated over time.

The sum is exact, however often it is read, and costs as little as a change of a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Occupancy:
    """Seconds that all objects together have spent in each state, including current ones."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Create an empty count. `now` is any clock that does not go back; while it stands, no time
        counts.
        """
        self._now = now
        self._counts: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}  # end of the time in `_seconds`

    @contextmanager
    def occupy(self, place: str) -> Iterator[None]:
        """Count one more object in a state during the block."""
        self.set_count(place, self.read_count(place) + 1)
        try:
            yield
        finally:
            self.set_count(place, self.read_count(place) - 1)

    def set_count(self, place: str, count: float) -> None:
        """Set the number of objects in a state."""
        self._seconds[place], self._since[place] = self.read_seconds(place), self._now()
        self._counts[place] = count

    def read_count(self, place: str) -> float:
        """Return the current number of objects in a state."""
        return self._counts.get(place, 0.0)

    def read_seconds(self, place: str) -> float:
        """Return the total seconds of all objects in a state up to now; 0.0 if it never had any."""
        if place not in self._since:
            return 0.0
        lasts_s = self._now() - self._since[place]
        return self._seconds[place] + self._counts[place] * lasts_s
