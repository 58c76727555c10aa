"""How a rank beside the first saves, restores and stages its own rows, as rank 0 orders."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from meshrl.common.api.ranks import (
    MOVE_S,
    RestoreRows,
    RowsRestored,
    RowsSaved,
    RowsStaged,
    SavedFiles,
    SaveRows,
    StagedRows,
    StageRows,
    Trouble,
)
from meshrl.common.base.errors import MeshError, RankLost
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.records.checkpoints import STATE, files_below
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.laying import How
from meshrl.common.weights.staging import Stager
from meshrl.common.weights.store.weight_store import put_file
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.trouble import UNREADABLE, UNWRITABLE, tried, trouble_of
from meshrl.services.trainer.rows.checkpoint_files import checkpoint_files
from meshrl.services.trainer.rows.filling import masters_of
from meshrl.services.trainer.rows.saved import RowsMissing, SavedRows, files_for, save_rows

T = TypeVar("T")
ANSWER_S = 60.0  # until who asked hears that it goes on; well below the deadlines of the calls


class Errand(Generic[T]):
    """Work that takes a rank longer than a call may last, and is asked for until it is done: one
    piece at a time, whose result stays until another one, or `close`.
    """

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._key: Hashable = None
        self._task: asyncio.Task[T] | None = None

    async def asked(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return what `work`, begun once for a `key`, does; None while it goes on; RankLost."""
        if self._task is None or key != self._key:
            await self.close()
            self._key, self._task = key, asyncio.create_task(work(), name="errand")
            self._task.add_done_callback(looked_at)
        task = self._task
        await asyncio.wait([task], timeout=self._answer_s)
        if task.cancelled():
            raise RankLost("what was asked for was given up")
        return task.result() if task.done() else None

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic


class _Part(Generic[T]):
    """The part of a rank other than 0 in what a gang does with its rows."""

    def __init__(self, mesh: Mesh, bulk: BulkClient, data: JobData, rank: Rank, run: Run) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._rank, self._run = rank, run
        self._errand = Errand[T]()

    async def close(self) -> None:
        await self._errand.close()


class RankSaving(_Part[SavedFiles]):
    _begun: Path | None = None  # what it writes for rank 0 on another host

    def _path(self, host: str, name: str) -> Path:
        """Beside what rank 0 writes if that is on this host, else a directory of its own."""
        own = name if host == self._mesh.settings.host else f"{name}.{self._rank.rank}"
        return self._data.here / "checkpoints" / Path(own).name / STATE

    async def save(self, order: SaveRows) -> Trouble:
        """Write rows of some tensors; the answer says what hinders it, lest the group be lost."""
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
        """Give up what was begun for rank 0 on another host, also by an earlier process."""
        await self._errand.close()
        self._begun = None
        left = self._data.here / "checkpoints"

        def remove() -> None:
            for path in left.glob(f"step-*.*.{self._rank.rank}"):
                shutil.rmtree(path, ignore_errors=True)

        await self._mesh.host.run_blocking(remove, deadline_s=MOVE_S)

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


class RankRestoring(_Part[Trouble]):
    async def restore(self, order: RestoreRows) -> RowsRestored:
        """Has the rows of a checkpoint, which may take as long as their way does; what hinders that
        and can be mended is the answer, or the group would be lost for it.
        """
        key = order.generation, order.number
        trouble = await self._errand.asked(key, partial(self._restored, order))
        return RowsRestored(goes_on=True) if trouble is None else RowsRestored(trouble)

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


class RankStaging(_Part[StagedRows]):
    _number = 0
    _stager: Stager | None = None

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
        """Return what lies where, once all was staged, however long; RankLost if nothing was."""
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
            laid = await stager.end()
            return StagedRows(laid.pieces, laid.image, laid.masters)
        await stager.settled()
        return StagedRows()

    async def close(self) -> None:
        await super().close()
        stager, self._stager = self._stager, None
        if stager is not None:
            await stager.close()


@torch.no_grad()
def write(rank: Rank, path: Path, names: Sequence[str], number: int, masters: bool) -> None:
    """Writes a rank's rows of some tensors to a file; what all ranks have alike is rank 0's."""
    own = rank.learner.saved(masters)
    parts = {name: own[name] for name in names if own[name].shape or not rank.rank}
    parts = {name: part for name, part in parts.items() if part.rows.numel()}
    if parts:
        save_rows(path, f"part-{rank.rank:05d}-{number:05d}.safetensors", parts)
