"""Row ownership in a zebra gang: attention ranks come first, then expert ranks."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.model.network.moe import is_expert_matrix
from meshrl.services.trainer.sharding.row_ownership import split_evenly


@dataclass(frozen=True)
class ZebraOwnership:
    """Ownership of a zebra gang's rows, see `RowOwnership`.

    Each attention rank has `hosted_experts[i]` experts of the i-th MoE layer, from the first
    experts on; the expert ranks share the rest. All other parameters are split over the attention
    ranks.
    """

    attention_ranks: int
    expert_ranks: int
    moe_layers: tuple[int, ...]  # their indices among all layers
    experts_per_layer: int
    hosted_experts: tuple[int, ...]

    def get_rows(self, name: str, total: int, rank: int) -> slice:
        if is_expert_matrix(name):
            return self.get_experts(self.moe_layers.index(int(name.split(".")[1])), rank)
        if rank < self.attention_ranks:
            return split_evenly(total, rank, self.attention_ranks)
        return slice(total, total)

    def get_experts(self, moe_layer: int, rank: int) -> slice:
        """Return the experts of the MoE layer at this index that a rank has."""
        hosted = self.hosted_experts[moe_layer]
        if rank < self.attention_ranks:
            return slice(rank * hosted, (rank + 1) * hosted)
        first, number = self.attention_ranks * hosted, rank - self.attention_ranks
        unhosted = self.experts_per_layer - first
        begin, end = (unhosted * n // self.expert_ranks for n in (number, number + 1))
        return slice(first + begin, first + end)

    def list_owners(self, moe_layer: int) -> list[int]:
        """Return the ranks that have experts of a layer, in the order of the experts."""
        ranks = range(self.attention_ranks + self.expert_ranks)
        own = ((rank, self.get_experts(moe_layer, rank)) for rank in ranks)
        return [rank for rank, rows in own if rows.stop > rows.start]
