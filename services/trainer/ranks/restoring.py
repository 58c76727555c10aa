"""How a gang goes on from a checkpoint: each rank reads its own rows of the state and of the
weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from common.api.ranks import MOVE_S, RestoreRows, RowsRestored, Trouble
from common.job.bundle.job_data import JobData
from common.mesh.runtime.mesh import Mesh
from common.records.checkpoints import STATE
from common.weights.bulk.port import BulkClient
from services.trainer.ranks.errand import Errand
from services.trainer.ranks.rank import Rank
from services.trainer.ranks.trouble import UNREADABLE, trouble_of
from services.trainer.rows.checkpoint_files import checkpoint_files
from services.trainer.rows.filling import masters_of
from services.trainer.rows.saved import RowsMissing, SavedRows, files_for

Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic


class RankRestoring:
    """The part of a rank other than 0."""

    def __init__(self, mesh: Mesh, bulk: BulkClient, data: JobData, rank: Rank, run: Run) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._rank, self._run = rank, run
        self._errand = Errand[Trouble]()

    async def restore(self, order: RestoreRows) -> RowsRestored:
        """Has the rows of a checkpoint, which may take as long as their way does; what hinders that
        and can be mended is the answer, or the group would be lost for it.
        """
        key = order.generation, order.number
        trouble = await self._errand.asked(key, partial(self._restored, order))
        return RowsRestored(goes_on=True) if trouble is None else RowsRestored(trouble)

    async def close(self) -> None:
        """What is under way is given up."""
        await self._errand.close()

    async def _restored(self, order: RestoreRows) -> Trouble:
        rank = self._rank
        below = [] if self._data.at_home else files_for(order.files, rank.rank, rank.ranks)
        try:
            if below:
                with suppress(RowsMissing):  # rows may have been cut otherwise
                    await self._from_files(order, below)
                    return Trouble()
            await self._from_files(order, [STATE])
        except UNREADABLE as error:
            return trouble_of(error)
        return Trouble()

    async def _from_files(self, order: RestoreRows, below: Sequence[str]) -> None:
        mesh, run = self._mesh, self._mesh.host.run_blocking
        checked = self._data.at_home and order.host == mesh.settings.host
        listed = {} if checked else order.files
        files = checkpoint_files(mesh, self._bulk, self._data, order.name, listed, below)
        async with files as directory:
            saved = await run(SavedRows, directory / STATE, deadline_s=MOVE_S)
            own = self._rank.learner.rows(self._rank.learner.outline(False))
            fill = await masters_of(mesh, self._bulk, order.manifest, saved, own)
            await self._run(self._rank.learner.restore, saved, fill, deadline_s=MOVE_S)
