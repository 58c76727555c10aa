"""How a rank beside the first stages its own rows, as rank 0 orders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from common.api.ranks import MOVE_S, RowsStaged, StagedRows, StageRows
from common.base.errors import RankLost
from common.mesh.runtime.mesh import Mesh
from common.weights.bulk.port import BulkClient
from common.weights.layout.laying import How, Laid
from common.weights.staging import Stager
from services.trainer.ranks.errand import Errand
from services.trainer.ranks.rank import Rank

Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic


class RankStaging:
    """The part of a rank other than 0 in a gang's staging."""

    def __init__(self, mesh: Mesh, bulk: BulkClient, rank: Rank, run: Run) -> None:
        self._mesh, self._bulk, self._rank, self._run = mesh, bulk, rank, run
        self._number = 0
        self._stager: Stager | None = None
        self._errand = Errand[StagedRows]()

    async def stage(self, order: StageRows) -> None:
        """Copies what is ordered; a new staging ends the one before."""
        if self._stager is None or order.number != self._number:
            await self.close()
            how = How(order.dtype, order.chunk_bytes, order.write)
            self._stager = Stager(self._mesh, self._bulk, how, order.what)
            self._number = order.number
        stager = self._stager
        rows = partial(self._rank.learner.rows, order.names, order.part, order.parts)
        stager.write(await self._run(stager.lay, rows, deadline_s=MOVE_S))

    async def staged(self, order: RowsStaged) -> StagedRows:
        """What lies where, once all was staged, however long the disk is full; RankLost when
        nothing was.
        """
        stager = self._stager
        if stager is None or order.number != self._number:
            raise RankLost("nothing of this staging is here", where=self._mesh.name)
        key = order.number, order.whole
        found = await self._errand.asked(key, partial(self._staged, stager, order.whole))
        if found is None:
            return StagedRows(goes_on=True)
        if not order.whole:
            await self._errand.close()  # the next one waits anew
        return found

    async def _staged(self, stager: Stager, whole: bool) -> StagedRows:
        if whole:
            return staged_rows(await stager.end())
        await stager.settled()
        return StagedRows()

    async def close(self) -> None:
        """What is under way is given up."""
        await self._errand.close()
        stager, self._stager = self._stager, None
        if stager is not None:
            await stager.close()


def staged_rows(laid: Laid) -> StagedRows:
    """Return the rows as they travel."""
    return StagedRows(laid.pieces, laid.image, laid.masters)
