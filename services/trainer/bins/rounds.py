"""Plans the rounds of a step, as many bins as are computed at once, while groups come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.kernels.cost import BinCost
from meshrl.kernels.packing import Round, RoundPacker
from meshrl.services.trainer.bins import packing
from meshrl.services.trainer.bins.packing import Bin

Sample = tuple[int, int]  # group, and which of its trajectories
RoundPlan = list[list[list[Sample]]]  # rounds of a step: of each, the bins, and what is in them


class RoundMaker:
    """Takes sequences as they come and gives rounds; `plan` is what was given so far.

    `cost` says what lengths cost beside each other, so that bins of a round take equally long.
    """

    def __init__(self, budget: int, bins: int, version: int, cost: BinCost | None = None) -> None:
        self._packer = RoundPacker(budget, bins, cost)
        self._version = version
        self._came: list[packing.Sequence] = []
        self.plan: RoundPlan = []

    def add(self, sequences: Sequence[packing.Sequence]) -> list[list[Bin]]:
        self._came += sequences
        return self._made(self._packer.add([s.places for s in sequences]))

    def flush(self) -> list[list[Bin]]:
        return self._made(self._packer.flush())

    def _made(self, rounds: list[Round]) -> list[list[Bin]]:
        chosen = [[[self._came[i] for i in bin] for bin in one] for one in rounds]
        self.plan += [[[(s.group, s.member) for s in bin] for bin in one] for one in chosen]
        return [[packing.fill(bin, self._version) for bin in one] for one in chosen]


def planned(
    plan: RoundPlan, sequences: Mapping[Sample, packing.Sequence], version: int
) -> list[list[Bin]]:
    """The same rounds again, from the same sequences."""
    return [
        [packing.fill([sequences[group, member] for group, member in bin], version) for bin in one]
        for one in plan
    ]
