"""Who computes which round of a step: the core and its hybrids take from the front, the first
result counts.

A round is one bin for each rank of the core. Pure: no clock of its own, no I/O. Whoever computes a
round gets the same gradient, and sums are added in the order of rounds, so the update does not
depend on who helped.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Leased:
    gang: str
    until: float  # seconds; past it the core computes the round itself


@dataclass
class RoundBoard:
    """The rounds of one step; more may come until it is closed."""

    count: int = 0
    closed: bool = False
    results: set[int] = field(default_factory=set)
    _leases: dict[int, Leased] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)  # by the core

    @property
    def complete(self) -> bool:
        """Nothing is missing, and nothing more will come."""
        return self.closed and len(self.results) == self.count

    def grow(self, rounds: int) -> None:
        self.count += rounds

    def lease(self, gang: str, until: float) -> int | None:
        """The first round that nobody has; None when there is none."""
        for index in range(self.count):
            if index not in self.results and index not in self._leases and index not in self._taken:
                self._leases[index] = Leased(gang, until)
                return index
        return None

    def take(self, now: float) -> int | None:
        """The next round for the core: the first that nobody has, else one whose lease ran out."""
        for index in range(self.count):
            if index not in self.results and index not in self._leases and index not in self._taken:
                self._taken.add(index)
                return index
        for index, lease in sorted(self._leases.items()):
            if index not in self.results and index not in self._taken and lease.until <= now:
                self._taken.add(index)
                return index
        return None

    def release(self, gang: str) -> bool:
        """The rounds that a hybrid had are free; whether there were any."""
        held = [i for i, lease in self._leases.items() if lease.gang == gang]
        for index in held:
            del self._leases[index]
        return any(index not in self.results for index in held)

    def next_expiry(self) -> float | None:
        """When the first lease that is still awaited runs out."""
        waiting = [
            lease.until
            for i, lease in self._leases.items()
            if i not in self.results and i not in self._taken
        ]
        return min(waiting, default=None)

    def done(self, index: int) -> bool:
        """Counts a result; False when another one came first or there is no such round."""
        if index in self.results or not 0 <= index < self.count:
            return False
        self.results.add(index)
        return True
