"""Who computes which bin of a step: the core takes from the front, hybrids lease from the back, the
first result counts.

Pure: no clock of its own, no I/O. Whoever computes a bin gets the same gradient, and sums are added
in bin order, so the update does not depend on who helped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(slots=True)
class Leased:
    gang: str
    until: float  # seconds; past it the core computes the bin itself


@dataclass
class BinBoard(Generic[R]):
    """The bins of one step."""

    count: int
    results: dict[int, R] = field(default_factory=dict)
    _leases: dict[int, Leased] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)  # by the core

    @property
    def complete(self) -> bool:
        return len(self.results) == self.count

    def lease(self, gang: str, until: float) -> int | None:
        """The last bin that nobody has; None when there is none."""
        for index in range(self.count - 1, -1, -1):
            if index not in self.results and index not in self._leases and index not in self._taken:
                self._leases[index] = Leased(gang, until)
                return index
        return None

    def take(self, now: float) -> int | None:
        """The next bin for the core: the first that nobody has, else one whose lease ran out."""
        for index in range(self.count):
            if index not in self.results and index not in self._leases and index not in self._taken:
                self._taken.add(index)
                return index
        for index, lease in sorted(self._leases.items()):
            if index not in self.results and index not in self._taken and lease.until <= now:
                self._taken.add(index)
                return index
        return None

    def next_expiry(self) -> float | None:
        """When the first lease that is still awaited runs out."""
        waiting = [lease.until for i, lease in self._leases.items() if i not in self.results]
        return min(waiting, default=None)

    def done(self, index: int, result: R) -> bool:
        """Counts a result; False when another one came first or there is no such bin."""
        if index in self.results or not 0 <= index < self.count:
            return False
        self.results[index] = result
        return True

    def in_order(self) -> list[R]:
        return [self.results[index] for index in range(self.count)]
