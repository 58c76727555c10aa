"""Which rows of each parameter a rank of a gang has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshrl.common.model.network.moe import is_expert_matrix


class RowOwnership(Protocol):
    """All ranks know the same; every row of a parameter belongs to one of them."""

    def get_rows(self, name: str, total: int, rank: int) -> slice:
        """A rank's rows of the `total` ones of a parameter; they lie side by side."""


def split_evenly(total: int, rank: int, ranks: int) -> slice:
    """As many rows for each, the last ones fewer: as FSDP cuts."""
    each = -(-total // ranks)
    return slice(min(rank * each, total), min((rank + 1) * each, total))


@dataclass(frozen=True)
class EvenOwnership:
    """The experts of a layer are split over `parallel` neighbouring ranks, which divides both their
    number and that of all ranks; those of one part are cut over the ranks that have it. All other
    parameters are cut alike.
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
