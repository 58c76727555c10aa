"""How a rank beside the first saves its own rows, as rank 0 orders."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.api.ranks import MOVE_S, RowsSaved, SavedFiles, SaveRows, Trouble
from common.base.errors import MeshError
from common.job.bundle.job_data import JobData
from common.mesh.runtime.mesh import Mesh
from common.records.checkpoints import STATE, files_below
from common.weights.bulk.port import BulkClient
from common.weights.store.weight_store import put_file
from services.trainer.ranks.errand import Errand
from services.trainer.ranks.rank import Rank
from services.trainer.ranks.trouble import UNWRITABLE, tried, trouble_of
from services.trainer.rows.saved import save_rows

Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic


class RankSaving:
    """The part of a rank other than 0 in a gang's saving."""

    def __init__(self, mesh: Mesh, bulk: BulkClient, data: JobData, rank: Rank, run: Run) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._rank, self._run = rank, run
        self._errand = Errand[SavedFiles]()
        self._begun: Path | None = None  # what it writes for rank 0 on another host

    def _path(self, host: str, name: str) -> Path:
        """Beside what rank 0 writes if that is on this host, else a directory of its own."""
        own = name if host == self._mesh.settings.host else f"{name}.{self._rank.rank}"
        return self._data.here / "checkpoints" / Path(own).name / STATE

    async def save(self, order: SaveRows) -> Trouble:
        """Writes its rows of some tensors; what hinders that is the answer, or the group would be
        lost for it.
        """
        path = self._path(order.host, order.name)
        if order.host != self._mesh.settings.host and path != self._begun:
            await self.clear()  # rank 0 has given the one before up
            self._begun = path
        about = self._rank, path, order.names, order.number, order.masters
        trouble: Trouble = await self._run(tried, UNWRITABLE, write, *about, deadline_s=MOVE_S)
        return trouble

    async def saved(self, order: RowsSaved) -> SavedFiles:
        """Files that rank 0 does not see are in the store from then on, and no more here."""
        if order.host == self._mesh.settings.host:
            return SavedFiles()
        key = order.generation, order.name
        found = await self._errand.asked(key, partial(self._stored, order))
        return SavedFiles(goes_on=True) if found is None else found

    async def clear(self) -> None:
        """What was begun for rank 0 on another host is given up, also what an earlier process of
        this rank has left.
        """
        await self._errand.close()
        self._begun = None
        run, directory = self._mesh.host.run_blocking, self._data.here / "checkpoints"
        await run(remove_scratch, directory, self._rank.rank, deadline_s=MOVE_S)

    async def _stored(self, order: RowsSaved) -> SavedFiles:
        run, path = self._mesh.host.run_blocking, self._path(order.host, order.name)
        files = {}
        try:
            for name in await run(files_below, path, deadline_s=MOVE_S):
                said = f"{name} of a rank's state"
                files[name] = await put_file(self._mesh, self._bulk, path / name, said)
        except (MeshError, OSError) as error:
            return SavedFiles(trouble=trouble_of(error))
        finally:
            await run(shutil.rmtree, path.parent, True, deadline_s=MOVE_S)
        return SavedFiles(files)


def remove_scratch(directory: Path, rank: int) -> None:
    """Removes what a rank has of its own below the directory of checkpoints. It blocks."""
    for path in directory.glob(f"step-*.*.{rank}"):
        shutil.rmtree(path, ignore_errors=True)


@torch.no_grad()
def write(rank: Rank, path: Path, names: Sequence[str], number: int, masters: bool) -> None:
    """Writes a rank's rows of some tensors to a file; what all ranks have alike is rank 0's."""
    own = rank.learner.saved(masters)
    parts = {name: own[name] for name in names if own[name].shape or not rank.rank}
    parts = {name: part for name, part in parts.items() if part.rows.numel()}
    if parts:
        save_rows(path, f"part-{rank.rank:05d}-{number:05d}.safetensors", parts)
