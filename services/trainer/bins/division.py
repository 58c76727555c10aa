"""How a round's bins are divided among ranks: alike on all, and in all steps of a lineage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.services.trainer.bins.packing import Bin

RoundBins = Sequence[Bin]  # as many as the division says


@dataclass(frozen=True)
class EvenDivision:
    """One bin for each rank. The experts of a mixture are split over `expert_parallel` of them."""

    ranks: int = 1
    expert_parallel: int = 1

    @property
    def bins_per_round(self) -> int:
        return self.ranks

    @property
    def bins_per_score(self) -> int:
        """Bins that are scored at once, one on each of the first ranks."""
        return self.ranks

    @property
    def told(self) -> Any:
        """What stands of it in records: who computes otherwise rounds otherwise."""
        if self.expert_parallel == 1:
            return self.ranks
        return {"ranks": self.ranks, "expert_parallel": self.expert_parallel}

    def assign_bins(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        return [[bin] for bin in bins]


@dataclass(frozen=True)
class ZebraDivision:
    """`micros` bins for each of the first ranks, which have attention; the others have experts, and
    `hosted` of each mixture layer are on every attention rank.
    """

    attention_ranks: int
    expert_ranks: int
    micro_batches: int
    hosted_experts: tuple[int, ...]  # by mixture layer

    @property
    def bins_per_round(self) -> int:
        return self.attention_ranks * self.micro_batches

    @property
    def bins_per_score(self) -> int:
        return self.attention_ranks

    @property
    def told(self) -> Any:
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
