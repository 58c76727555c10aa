"""Which sequences of a step are computed together: rounds of one bin for each rank, made while
groups still come in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.trainer import batching
from services.trainer.batching import Bin

Member = tuple[int, int]  # group, and which of its trajectories
RoundPlan = list[list[list[Member]]]  # rounds of a step: of each, the bins, and what is in them

AHEAD = (
    2.0  # rounds' worth of tokens to choose from before one is packed: more, and bins are fuller
)


class RoundMaker:
    """Takes sequences as they come and gives rounds; `plan` is what was given so far."""

    def __init__(self, budget: int, ranks: int, version: int) -> None:
        self._budget, self._ranks, self._version = budget, ranks, version
        self._left: list[batching.Sequence] = []
        self.plan: RoundPlan = []

    def add(self, sequences: Sequence[batching.Sequence]) -> list[list[Bin]]:
        """The rounds that are full now."""
        self._left += sequences
        enough = AHEAD * self._budget * self._ranks
        if sum(s.places for s in self._left) < enough:
            return []
        chosen = self._packed()
        full = len(chosen) // self._ranks * self._ranks
        full -= self._ranks if full == len(chosen) else 0
        self._left = [s for members in chosen[full:] for s in members]
        return self._rounds(chosen[:full])

    def flush(self) -> list[list[Bin]]:
        """The rounds of all that is left."""
        chosen, self._left = self._packed(), []
        return self._rounds(chosen)

    def _packed(self) -> list[list[batching.Sequence]]:
        return batching.packed(self._left, self._budget)

    def _rounds(self, bins: list[list[batching.Sequence]]) -> list[list[Bin]]:
        bins = bins + [[]] * (-len(bins) % self._ranks)
        rounds = [bins[i : i + self._ranks] for i in range(0, len(bins), self._ranks)]
        self.plan += [[[(s.group, s.member) for s in bin] for bin in one] for one in rounds]
        return [[batching.fill(bin, self._version) for bin in one] for one in rounds]


def planned(
    plan: RoundPlan, sequences: Mapping[Member, batching.Sequence], version: int
) -> list[list[Bin]]:
    """The same rounds again, from the same sequences."""
    return [
        [batching.fill([sequences[group, member] for group, member in bin], version) for bin in one]
        for one in plan
    ]
