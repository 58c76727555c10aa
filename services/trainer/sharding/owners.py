"""Which rows of each parameter a rank of a gang has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshrl.common.model.network.moe import is_expert


class Owners(Protocol):
    """All ranks know the same; every row of a parameter belongs to one of them."""

    def rows(self, name: str, total: int, rank: int) -> slice:
        """A rank's rows of the `total` ones of a parameter; they lie side by side."""


def evenly(total: int, rank: int, ranks: int) -> slice:
    """As many rows for each, the last ones fewer: as FSDP cuts."""
    each = -(-total // ranks)
    return slice(min(rank * each, total), min((rank + 1) * each, total))


@dataclass(frozen=True)
class EvenOwners:
    """The experts of a layer are split over `parallel` neighbouring ranks, which divides both their
    number and that of all ranks; those of one part are cut over the ranks that have it. All other
    parameters are cut alike.
    """

    ranks: int
    parallel: int

    def rows(self, name: str, total: int, rank: int) -> slice:
        if not is_expert(name):
            return evenly(total, rank, self.ranks)
        each = total // self.parallel
        within, part = divmod(rank, self.parallel)
        own = evenly(each, within, self.ranks // self.parallel)
        return slice(part * each + own.start, part * each + own.stop)
