"""What each rank of a zebra gang has: attention ranks come first, then expert ranks."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.model.network.moe import is_expert
from meshrl.services.trainer.sharding.owners import evenly


@dataclass(frozen=True)
class ZebraOwners:
    """See `Owners`. `hosted[i]`: experts of the i-th mixture layer that each attention rank has,
    its first ones; the expert ranks share the rest. All other parameters are cut over the attention
    ranks.
    """

    attention: int
    experts: int
    mixture_layers: tuple[int, ...]  # their numbers among all layers
    experts_per_layer: int
    hosted: tuple[int, ...]

    def rows(self, name: str, total: int, rank: int) -> slice:
        if is_expert(name):
            return self.experts_of(self.mixture_layers.index(int(name.split(".")[1])), rank)
        if rank < self.attention:
            return evenly(total, rank, self.attention)
        return slice(total, total)

    def experts_of(self, mixture: int, rank: int) -> slice:
        """The experts that a rank has of the mixture layer of this number."""
        hosted = self.hosted[mixture]
        if rank < self.attention:
            return slice(rank * hosted, (rank + 1) * hosted)
        first, number = self.attention * hosted, rank - self.attention
        left = self.experts_per_layer - first
        begin, end = (left * n // self.experts for n in (number, number + 1))
        return slice(first + begin, first + end)

    def owners(self, mixture: int) -> list[int]:
        """The ranks that have experts of a layer, in the order of these."""
        ranks = range(self.attention + self.experts)
        own = ((rank, self.experts_of(mixture, rank)) for rank in ranks)
        return [rank for rank, rows in own if rows.stop > rows.start]
