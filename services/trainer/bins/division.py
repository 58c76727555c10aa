"""How a round's bins are divided among the ranks of a gang, and how it computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.trainer.bins.packing import Bin

Round = Sequence[Bin]  # as many as the division says


class RoundDivision(Protocol):
    """The same on all ranks, and in every step of a lineage."""

    @property
    def bins(self) -> int:
        """Of a round."""

    @property
    def scored(self) -> int:
        """Bins that are scored at once, one on each of the first ranks."""

    @property
    def told(self) -> Any:
        """What stands of it in records: who computes otherwise rounds otherwise."""

    def dealt(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        """Those of each rank."""


@dataclass(frozen=True)
class EvenDivision:
    """One bin for each rank. The experts of a mixture are split over `expert_parallel` of them."""

    ranks: int = 1
    expert_parallel: int = 1

    @property
    def bins(self) -> int:
        """See `RoundDivision`."""
        return self.ranks

    @property
    def scored(self) -> int:
        """See `RoundDivision`."""
        return self.ranks

    @property
    def told(self) -> Any:
        """See `RoundDivision`."""
        if self.expert_parallel == 1:
            return self.ranks
        return {"ranks": self.ranks, "expert_parallel": self.expert_parallel}

    def dealt(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        """See `RoundDivision`."""
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
        """See `RoundDivision`."""
        return self.attention * self.micros

    @property
    def scored(self) -> int:
        """See `RoundDivision`."""
        return self.attention

    @property
    def told(self) -> Any:
        """See `RoundDivision`."""
        return {
            "attention": self.attention,
            "experts": self.experts,
            "micro_batches": self.micros,
            "hosted": list(self.hosted),
        }

    def dealt(self, bins: Sequence[Bin]) -> list[list[Bin]]:
        """See `RoundDivision`."""
        own = [list(bins[i : i + self.micros]) for i in range(0, len(bins), self.micros)]
        return own + [[] for _ in range(self.experts)]
