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
MAX_ROUNDS_AHEAD = 16


@dataclass(slots=True)
class LeasedRound:
    """A round that a hybrid computes."""

    instance: str
    expires_s: float  # seconds; past it the core computes the round itself


@dataclass
class RoundBoard:
    """The rounds of one update; more may come until it is closed."""

    round_count: int = 0
    is_closed: bool = False
    completed_rounds: set[int] = field(default_factory=set)
    _arriving_rounds: set[int] = field(
        default_factory=set
    )  # computed by a hybrid, and not yet kept
    _leases: dict[int, LeasedRound] = field(default_factory=dict)
    _core_rounds: set[int] = field(default_factory=set)  # by the core
    _first_incomplete: int = 0  # round without a result

    @property
    def is_complete(self) -> bool:
        """Whether every round has its result, and no more rounds will come."""
        return self.is_closed and len(self.completed_rounds) == self.round_count

    def add_rounds(self, count: int) -> None:
        """Adds so many rounds to the end."""
        self.round_count += count

    def lease_round(self, instance: str, expires_s: float) -> int | None:
        """The first round that nobody has; None when there is none."""
        index = self._find_free_round()
        if index is not None:
            self._leases[index] = LeasedRound(instance, expires_s)
        return index

    def take_round(self, now_s: float) -> int | None:
        """The next round for the core: one whose lease ran out, else the first that nobody has.

        What is late goes first, because results are added in the order of rounds: all that come
        after it have to be kept meanwhile.
        """
        leases = self._leases.items()
        late = [i for i, lease in leases if lease.expires_s <= now_s and not self._is_taken(i)]
        index = min(late) if late else self._find_free_round()
        if index is not None:
            self._core_rounds.add(index)
        return index

    def release_rounds(self, instance: str) -> bool:
        """The rounds that a hybrid had are free; whether there were any."""
        held = [i for i, lease in self._leases.items() if lease.instance == instance]
        for index in held:
            del self._leases[index]
        return any(not self._is_taken(index) for index in held)

    def next_expiry(self) -> float | None:
        """When the first lease that is still awaited runs out."""
        waiting = [
            lease.expires_s for index, lease in self._leases.items() if not self._is_taken(index)
        ]
        return min(waiting, default=None)

    def claim_result(self, index: int) -> bool:
        """Take in a hybrid's result, to be kept; False if another was first, or of no round."""
        if (
            not 0 <= index < self.round_count
            or index in self.completed_rounds
            or index in self._arriving_rounds
        ):
            return False
        self._arriving_rounds.add(index)
        return True

    def release_claim(self, index: int) -> None:
        """It could not be kept: the round is anybody's."""
        self._arriving_rounds.discard(index)
        self._leases.pop(index, None)

    def complete_round(self, index: int) -> bool:
        """Counts a result; False when another one came first or there is no such round."""
        self._arriving_rounds.discard(index)
        if index in self.completed_rounds or not 0 <= index < self.round_count:
            return False
        self.completed_rounds.add(index)
        while self._first_incomplete in self.completed_rounds:
            self._first_incomplete += 1
        return True

    def _find_free_round(self) -> int | None:
        for index in range(
            self._first_incomplete, min(self.round_count, self._first_incomplete + MAX_ROUNDS_AHEAD)
        ):
            if (
                index not in self.completed_rounds
                and index not in self._leases
                and not self._is_taken(index)
            ):
                return index
        return None

    def _is_taken(self, index: int) -> bool:
        return (
            index in self.completed_rounds
            or index in self._core_rounds
            or index in self._arriving_rounds
        )
