"""How many of something are in each of some places, summed over time: exact however often it is
asked, and as cheap as a change of a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Occupancy:
    """Seconds that all together have spent in each place, those who are there now among them."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is any clock that does not go back; while it stands nothing is counted."""
        self._now = now
        self._counts: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}  # up to when `_seconds` counts

    @contextmanager
    def occupy(self, place: str) -> Iterator[None]:
        """One more is there for the time of the block, however it ends."""
        self.set_count(place, self.read_count(place) + 1)
        try:
            yield
        finally:
            self.set_count(place, self.read_count(place) - 1)

    def set_count(self, place: str, count: float) -> None:
        """So many are there from now on."""
        self._seconds[place], self._since[place] = self.read_seconds(place), self._now()
        self._counts[place] = count

    def read_count(self, place: str) -> float:
        """How many are there now."""
        return self._counts.get(place, 0.0)

    def read_seconds(self, place: str) -> float:
        """The sum over all that have been there, up to now; 0.0 where nobody was."""
        if place not in self._since:
            return 0.0
        lasts_s = self._now() - self._since[place]
        return self._seconds[place] + self._counts[place] * lasts_s
