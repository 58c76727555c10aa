"""Planner of a step's rounds, each of `bins_per_round` bins, while groups arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.kernels.bin_cost import BinCost
from meshrl.kernels.packing import Round, RoundPacker
from meshrl.services.trainer.bins import packing
from meshrl.services.trainer.bins.packing import Bin

SampleId = tuple[int, int]  # group, and index of the trajectory in it
RoundPlan = list[list[list[SampleId]]]  # of each round the bins, of each bin the samples


class RoundPlanner:
    """Planner that packs sequences into rounds as they arrive; `plan` records the rounds so far.

    `cost` estimates sequences' costs by length, so that the bins of a round take equally long.
    """

    def __init__(
        self, bin_tokens: int, bins_per_round: int, version: int, cost: BinCost | None = None
    ) -> None:
        self._packer = RoundPacker(bin_tokens, bins_per_round, cost)
        self._version = version
        self._sequences: list[packing.TrainingSequence] = []
        self.plan: RoundPlan = []

    def add(self, sequences: Sequence[packing.TrainingSequence]) -> list[list[Bin]]:
        self._sequences += sequences
        return self._build_rounds(self._packer.add_sequences([s.position_count for s in sequences]))

    def flush(self) -> list[list[Bin]]:
        return self._build_rounds(self._packer.flush())

    def _build_rounds(self, rounds: list[Round]) -> list[list[Bin]]:
        chosen = [[[self._sequences[i] for i in bin] for bin in one] for one in rounds]
        self.plan += [
            [[(s.group_id, s.member_index) for s in bin] for bin in one] for one in chosen
        ]
        return [[packing.build_bin(bin, self._version) for bin in one] for one in chosen]


def rebuild_rounds(
    plan: RoundPlan, sequences: Mapping[SampleId, packing.TrainingSequence], version: int
) -> list[list[Bin]]:
    """Build the rounds of a plan again from the same sequences."""
    return [
        [
            packing.build_bin([sequences[group, member] for group, member in bin], version)
            for bin in one
        ]
        for one in plan
    ]
