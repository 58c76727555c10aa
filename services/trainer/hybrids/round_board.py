"""Board that assigns the rounds of a step to the core and its hybrids.

Both take rounds from the front, and the first result of a round counts. A round is one bin for each
rank of the core. The board is pure: it has no clock and no I/O. Every process computes the same
gradient of a round, and gradients are added in the order of rounds. So the update does not depend
on which hybrids took part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Rounds that may be complete or in progress from the first missing one on. Each result is as
# large as the model, and retained until it is added.
MAX_ROUNDS_AHEAD = 16


@dataclass(slots=True)
class LeasedRound:
    """Round leased to a hybrid."""

    instance: str
    expires_s: float  # seconds; then the core computes the round itself


@dataclass
class RoundBoard:
    """Rounds of one update; more can be added until it is closed."""

    round_count: int = 0
    is_closed: bool = False
    completed_rounds: set[int] = field(default_factory=set)
    # computed by a hybrid, and not yet stored
    _arriving_rounds: set[int] = field(default_factory=set)
    _leases: dict[int, LeasedRound] = field(default_factory=dict)
    _core_rounds: set[int] = field(default_factory=set)  # taken by the core
    _first_incomplete: int = 0  # index of the first round without a result

    @property
    def is_complete(self) -> bool:
        """True if the board is closed and every round has its result."""
        return self.is_closed and len(self.completed_rounds) == self.round_count

    def add_rounds(self, count: int) -> None:
        """Add rounds to the end."""
        self.round_count += count

    def lease_round(self, instance: str, expires_s: float) -> int | None:
        """Lease the first free round to a hybrid; return None if there is none."""
        index = self._find_free_round()
        if index is not None:
            self._leases[index] = LeasedRound(instance, expires_s)
        return index

    def take_round(self, now_s: float) -> int | None:
        """Return the next round for the core: one with an expired lease, else the first free one.

        Late rounds go first, because results are added in the order of rounds: the results after a
        late round have to be retained until then.
        """
        leases = self._leases.items()
        late = [i for i, lease in leases if lease.expires_s <= now_s and not self._is_taken(i)]
        index = min(late) if late else self._find_free_round()
        if index is not None:
            self._core_rounds.add(index)
        return index

    def release_rounds(self, instance: str) -> bool:
        """Free the rounds leased to a hybrid; return True if any was still without a result."""
        leased_rounds = [i for i, lease in self._leases.items() if lease.instance == instance]
        for index in leased_rounds:
            del self._leases[index]
        return any(not self._is_taken(index) for index in leased_rounds)

    def next_expiry(self) -> float | None:
        """Return the earliest expiry of a lease without a result."""
        waiting = [
            lease.expires_s for index, lease in self._leases.items() if not self._is_taken(index)
        ]
        return min(waiting, default=None)

    def claim_result(self, index: int) -> bool:
        """Claim a hybrid's result; False if another came first or the round does not exist."""
        if (
            not 0 <= index < self.round_count
            or index in self.completed_rounds
            or index in self._arriving_rounds
        ):
            return False
        self._arriving_rounds.add(index)
        return True

    def release_claim(self, index: int) -> None:
        """Free a round whose claimed result could not be stored."""
        self._arriving_rounds.discard(index)
        self._leases.pop(index, None)

    def complete_round(self, index: int) -> bool:
        """Count a result; return False if another came first or the round does not exist."""
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
