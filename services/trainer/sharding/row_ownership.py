"""Ownership of parameter rows by the ranks of a gang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshrl.common.model.network.moe import is_expert_matrix


class RowOwnership(Protocol):
    """Ownership of rows, equal on all ranks; every row of a parameter has one owner."""

    def get_rows(self, name: str, total: int, rank: int) -> slice:
        """Return a rank's contiguous rows of the `total` ones of a parameter."""


def split_evenly(total: int, rank: int, ranks: int) -> slice:
    """Return equally many rows for each rank, fewer for the last ones, as FSDP shards."""
    each = -(-total // ranks)
    return slice(min(rank * each, total), min((rank + 1) * each, total))


@dataclass(frozen=True)
class EvenOwnership:
    """Even split of a layer's experts over `expert_parallel` neighbouring ranks.

    `expert_parallel` divides the numbers of experts and of ranks. The experts of one part are split
    over the ranks of that part. All other parameters are split over all ranks.
    """

    ranks: int
    expert_parallel: int

    def get_rows(self, name: str, total: int, rank: int) -> slice:
        if not is_expert_matrix(name):
            return split_evenly(total, rank, self.ranks)
        each = total // self.expert_parallel
        within, part = divmod(rank, self.expert_parallel)
        own = split_evenly(each, within, self.ranks // self.expert_parallel)
        return slice(part * each + own.start, part * each + own.stop)
