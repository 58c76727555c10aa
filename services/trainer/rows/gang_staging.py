"""How a gang's weights are staged: each rank puts its own rows into the store, and tells the core
where they lie.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from common.api.ranks import MOVE_S, Ranks, RowsStaged, StagedRows, StageRows
from common.errors import RankLost
from common.runtime.mesh import Mesh
from common.weights.laying import How, Laid
from common.weights.staging import Stager
from common.wire.bulk.port import BulkClient
from services.trainer.gang.group import Group
from services.trainer.ranks.errand import Errand
from services.trainer.ranks.rank import Rank

Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic

_numbers = itertools.count(1)


class GangStaging:
    """See `Staging`: each rank stages its own rows. RankLost once the group that has them now is
    none any more.
    """

    def __init__(self, group: Group, rank: Rank, stager: Stager, how: How, what: str) -> None:
        self._group, self._rank, self._stager = group, rank, stager
        self._how, self._what = how, what
        self._generation, self._number = group.current(), next(_numbers)

    async def copy(self, names: Sequence[str], part: int, parts: int) -> None:
        how = self._how.dtype, self._how.chunk_bytes, self._how.write
        async with self._group.busy:
            self._check()
            order = StageRows(
                self._generation, self._number, *how, self._what, list(names), part, parts
            )
            rows = partial(self._rank.rows, names, part, parts)
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
        rows = partial(self._rank.rows, order.names, order.part, order.parts)
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


def laid_of(told: StagedRows) -> Laid:
    """Return the inverse of `staged_rows`."""
    return Laid(told.pieces, told.image, told.masters)
