"""The board of a step's rounds, which says who computes which: the core and its hybrids take from
the front, and the first result counts.

A round is one bin for each rank of the core. Pure: no clock of its own, no I/O. Whoever computes a
round gets the same gradient, and sums are added in the order of rounds, so the update does not
depend on who helped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Rounds that may be there or under way from the first missing one on: each result of theirs is as
# large as the model, and kept until its turn.
AHEAD = 16


@dataclass(slots=True)
class RoundHolder:
    """A round that a hybrid computes."""

    helper: str
    until: float  # seconds; past it the core computes the round itself


@dataclass
class RoundBoard:
    """The rounds of one update; more may come until it is closed."""

    count: int = 0
    closed: bool = False
    results: set[int] = field(default_factory=set)
    _coming: set[int] = field(default_factory=set)  # computed by a hybrid, and not yet kept
    _leases: dict[int, RoundHolder] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)  # by the core
    _first: int = 0  # round without a result

    @property
    def complete(self) -> bool:
        """Whether every round has its result, and no more rounds will come."""
        return self.closed and len(self.results) == self.count

    def grow(self, rounds: int) -> None:
        """Adds so many rounds to the end."""
        self.count += rounds

    def lease(self, helper: str, until: float) -> int | None:
        """The first round that nobody has; None when there is none."""
        index = self._free()
        if index is not None:
            self._leases[index] = RoundHolder(helper, until)
        return index

    def take(self, now: float) -> int | None:
        """The next round for the core: one whose lease ran out, else the first that nobody has.

        What is late goes first, because results are added in the order of rounds: all that come
        after it have to be kept meanwhile.
        """
        leases = self._leases.items()
        late = [i for i, lease in leases if lease.until <= now and not self._is_sure(i)]
        index = min(late) if late else self._free()
        if index is not None:
            self._taken.add(index)
        return index

    def release(self, helper: str) -> bool:
        """The rounds that a hybrid had are free; whether there were any."""
        held = [i for i, lease in self._leases.items() if lease.helper == helper]
        for index in held:
            del self._leases[index]
        return any(not self._is_sure(index) for index in held)

    def next_expiry(self) -> float | None:
        """When the first lease that is still awaited runs out."""
        waiting = [lease.until for index, lease in self._leases.items() if not self._is_sure(index)]
        return min(waiting, default=None)

    def claim(self, index: int) -> bool:
        """Take in a hybrid's result, to be kept; False if another was first, or of no round."""
        if not 0 <= index < self.count or index in self.results or index in self._coming:
            return False
        self._coming.add(index)
        return True

    def disclaim(self, index: int) -> None:
        """It could not be kept: the round is anybody's."""
        self._coming.discard(index)
        self._leases.pop(index, None)

    def done(self, index: int) -> bool:
        """Counts a result; False when another one came first or there is no such round."""
        self._coming.discard(index)
        if index in self.results or not 0 <= index < self.count:
            return False
        self.results.add(index)
        while self._first in self.results:
            self._first += 1
        return True

    def _free(self) -> int | None:
        for index in range(self._first, min(self.count, self._first + AHEAD)):
            if index not in self.results and index not in self._leases and not self._is_sure(index):
                return index
        return None

    def _is_sure(self, index: int) -> bool:
        return index in self.results or index in self._taken or index in self._coming
