"""How a gang's weights are staged: each rank puts its own rows into the store, and tells the core
where they lie.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial

from common.api.ranks import MOVE_S, Ranks, RowsStaged, StagedRows, StageRows
from common.base.errors import RankLost
from common.weights.layout.laying import How, Laid
from common.weights.staging import Stager
from services.trainer.compute.piece_runner import SYNC, PieceRunner, piece
from services.trainer.gang.group import RankGroup
from services.trainer.ranks.rank import Rank

_numbers = itertools.count(1)


class GangStaging:
    """See `WeightStaging`: each rank stages its own rows. RankLost once the group that has them now
    is none any more.
    """

    def __init__(
        self,
        runner: PieceRunner,
        group: RankGroup,
        rank: Rank,
        stager: Stager,
        how: How,
        what: str,
    ) -> None:
        self.runner = runner
        self._group, self._rank, self._stager = group, rank, stager
        self._how, self._what = how, what
        self._generation, self._number = group.current(), next(_numbers)

    @piece(SYNC)
    async def copy(self, names: Sequence[str], part: int, parts: int) -> None:
        how = self._how.dtype, self._how.chunk_bytes, self._how.write
        self._check()
        order = StageRows(
            self._generation, self._number, *how, self._what, list(names), part, parts
        )
        rows = partial(self._rank.learner.rows, names, part, parts)
        chunks, _ = await self._group.together(
            MOVE_S, Ranks.stage, self._group.to_all(order), self._stager.lay, rows
        )
        self._stager.write(chunks)

    async def settled(self) -> None:
        await self._all(whole=False)

    async def end(self) -> list[Laid]:
        return await self._all(whole=True)

    async def _all(self, whole: bool) -> list[Laid]:
        self._check()
        own = self._stager.end() if whole else self._stager.settled()
        orders = self._group.to_all(RowsStaged(self._generation, self._number, whole))
        asked = self._group.or_lost(self._group.ask_all(Ranks.staged, orders))
        here, there = await asyncio.gather(own, asked)
        return [here, *map(laid_of, there)] if here is not None else []

    async def close(self) -> None:
        """Ranks give up what is not ended when the next staging begins."""
        await self._stager.close()

    def _check(self) -> None:
        if self._group.current() != self._generation:
            raise self._group.loss(RankLost("the group has been formed anew"))


def laid_of(told: StagedRows) -> Laid:
    """Return the inverse of `staged_rows`."""
    return Laid(told.pieces, told.image, told.masters)
