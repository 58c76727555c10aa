"""Division of a round's bins among ranks, equal on all ranks and in all steps of a lineage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.services.trainer.bins.packing import Bin

RoundBins = Sequence[Bin]  # as many as `bins_per_round`


@dataclass(frozen=True)
class EvenDivision:
    """One bin for each rank; an MoE model's experts are split over `expert_parallel` ranks."""

    ranks: int = 1
    expert_parallel: int = 1

    @property
    def bins_per_round(self) -> int:
        return self.ranks

    @property
    def bins_per_score(self) -> int:
        """Number of bins scored at once, one on each of the first ranks."""
        return self.ranks

    @property
    def document(self) -> Any:
        """Form of the division in records: another division rounds floats in another way."""
        if self.expert_parallel == 1:
            return self.ranks
        return {"ranks": self.ranks, "expert_parallel": self.expert_parallel}

    def assign_bins(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        return [[bin] for bin in bins]


@dataclass(frozen=True)
class ZebraDivision:
    """`micro_batches` bins for each attention rank; the ranks after these have experts.

    Every attention rank also has `hosted_experts` of each MoE layer.
    """

    attention_ranks: int
    expert_ranks: int
    micro_batches: int
    hosted_experts: tuple[int, ...]  # by MoE layer

    @property
    def bins_per_round(self) -> int:
        return self.attention_ranks * self.micro_batches

    @property
    def bins_per_score(self) -> int:
        return self.attention_ranks

    @property
    def document(self) -> Any:
        return {
            "attention": self.attention_ranks,
            "experts": self.expert_ranks,
            "micro_batches": self.micro_batches,
            "hosted": list(self.hosted_experts),
        }

    def assign_bins(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        own = [
            list(bins[i : i + self.micro_batches]) for i in range(0, len(bins), self.micro_batches)
        ]
        return own + [[] for _ in range(self.expert_ranks)]


RoundDivision = EvenDivision | ZebraDivision
