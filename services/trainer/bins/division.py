"""How a round's bins are divided among ranks: alike on all, and in all steps of a lineage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.services.trainer.bins.packing import Bin

Round = Sequence[Bin]  # as many as the division says


@dataclass(frozen=True)
class EvenDivision:
    """One bin for each rank. The experts of a mixture are split over `expert_parallel` of them."""

    ranks: int = 1
    expert_parallel: int = 1

    @property
    def bins(self) -> int:
        return self.ranks

    @property
    def scored(self) -> int:
        """Bins that are scored at once, one on each of the first ranks."""
        return self.ranks

    @property
    def told(self) -> Any:
        """What stands of it in records: who computes otherwise rounds otherwise."""
        if self.expert_parallel == 1:
            return self.ranks
        return {"ranks": self.ranks, "expert_parallel": self.expert_parallel}

    def dealt(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        return [[bin] for bin in bins]


@dataclass(frozen=True)
class ZebraDivision:
    """`micros` bins for each of the first ranks, which have attention; the others have experts, and
    `hosted` of each mixture layer are on every attention rank.
    """

    attention: int
    experts: int
    micros: int
    hosted: tuple[int, ...]  # by mixture layer

    @property
    def bins(self) -> int:
        return self.attention * self.micros

    @property
    def scored(self) -> int:
        return self.attention

    @property
    def told(self) -> Any:
        return {
            "attention": self.attention,
            "experts": self.experts,
            "micro_batches": self.micros,
            "hosted": list(self.hosted),
        }

    def dealt(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        own = [list(bins[i : i + self.micros]) for i in range(0, len(bins), self.micros)]
        return own + [[] for _ in range(self.experts)]


RoundDivision = EvenDivision | ZebraDivision
