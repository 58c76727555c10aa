"""Tasks by which a rank beside the first saves, restores and stages its own rows."""

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
    STATE_TRANSFER_TIMEOUT_S,
    FinishSaving,
    FinishStaging,
    RankFault,
    RestoreResult,
    RestoreRows,
    SaveRows,
    SavingResult,
    StageRows,
    StagingResult,
)
from meshrl.common.base.errors import MeshError, RankLost
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.records.checkpoints import STATE_FOLDER, list_files
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import StagingOptions
from meshrl.common.weights.staging import VersionStager
from meshrl.common.weights.store.weight_store_client import put_file
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_faults import (
    READ_FAULTS,
    WRITE_FAULTS,
    describe_fault,
    run_and_report,
)
from meshrl.services.trainer.rows.checkpoint_access import open_checkpoint_files
from meshrl.services.trainer.rows.row_filling import make_row_filler
from meshrl.services.trainer.rows.saved_rows import (
    RowsMissing,
    SavedRows,
    save_rows,
    select_rank_files,
)

T = TypeVar("T")
ANSWER_TIMEOUT_S = 60.0  # until an `in_progress` answer; well below the calls' deadlines


class BackgroundTask(Generic[T]):
    """Background task that outlasts a call, and is polled until it is done.

    One piece of work runs at a time. Its result stays until the next one, or `close`.
    """

    def __init__(self, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._key: Hashable = None
        self._task: asyncio.Task[T] | None = None

    async def poll(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the result of `work`, started once per `key`; None while it runs, or RankLost."""
        if self._task is None or key != self._key:
            await self.close()
            self._key, self._task = key, asyncio.create_task(work(), name="errand")
            self._task.add_done_callback(consume_exception)
        task = self._task
        await asyncio.wait([task], timeout=self._answer_timeout_s)
        if task.cancelled():
            raise RankLost("the requested operation was cancelled")
        return task.result() if task.done() else None

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# Runs blocking work on the thread of the rank's arithmetic.
RunBlocking = Callable[..., Awaitable[Any]]


class _RowTask(Generic[T]):
    """Part of a rank other than 0 in an operation of the gang on its rows."""

    def __init__(
        self, mesh: Mesh, bulk: BulkClient, data: JobData, rank: Rank, run: RunBlocking
    ) -> None:
        self._mesh, self._bulk, self._data = mesh, bulk, data
        self._rank, self._run = rank, run
        self._background_task = BackgroundTask[T]()

    async def close(self) -> None:
        await self._background_task.close()


class RowSaver(_RowTask[SavingResult]):
    _started_path: Path | None = None  # of the files for rank 0 on another host

    def _path(self, host: str, name: str) -> Path:
        """Return the path beside rank 0's files on the same host, else a directory of this rank."""
        own = name if host == self._mesh.settings.host else f"{name}.{self._rank.rank}"
        return self._data.local_run_dir / "checkpoints" / Path(own).name / STATE_FOLDER

    async def save(self, order: SaveRows) -> RankFault:
        """Write rows of some tensors; return a fault as the answer, to preserve the group."""
        path = self._path(order.rank0_host, order.checkpoint)
        if order.rank0_host != self._mesh.settings.host and path != self._started_path:
            await self.clear_unfinished()  # rank 0 has abandoned the previous one
            self._started_path = path
        about = self._rank, path, order.tensor_names, order.file_number, order.saves_masters
        fault: RankFault = await self._run(
            run_and_report, WRITE_FAULTS, write_rows, *about, deadline_s=STATE_TRANSFER_TIMEOUT_S
        )
        return fault

    async def finish(self, order: FinishSaving) -> SavingResult:
        """Upload files that rank 0 cannot read to the store, and remove them here."""
        if order.rank0_host == self._mesh.settings.host:
            return SavingResult()
        key = order.generation, order.checkpoint
        found = await self._background_task.poll(key, partial(self._upload_files, order))
        return SavingResult(in_progress=True) if found is None else found

    async def clear_unfinished(self) -> None:
        """Remove unfinished files for rank 0 on another host, also those of an earlier process."""
        await self._background_task.close()
        self._started_path = None
        checkpoints_dir = self._data.local_run_dir / "checkpoints"

        def remove() -> None:
            for path in checkpoints_dir.glob(f"step-*.*.{self._rank.rank}"):
                shutil.rmtree(path, ignore_errors=True)

        await self._mesh.host.run_blocking(remove, deadline_s=STATE_TRANSFER_TIMEOUT_S)

    async def _upload_files(self, order: FinishSaving) -> SavingResult:
        run, path = self._mesh.host.run_blocking, self._path(order.rank0_host, order.checkpoint)
        files = {}
        try:
            for name in await run(list_files, path, deadline_s=STATE_TRANSFER_TIMEOUT_S):
                description = f"{name} of a rank's state"
                files[name] = await put_file(self._mesh, self._bulk, path / name, description)
        except (MeshError, OSError) as error:
            return SavingResult(fault=describe_fault(error))
        finally:
            await run(shutil.rmtree, path.parent, True, deadline_s=STATE_TRANSFER_TIMEOUT_S)
        return SavingResult(files)


class RowRestorer(_RowTask[RankFault]):
    async def restore(self, order: RestoreRows) -> RestoreResult:
        """Restore a checkpoint's rows, which may take as long as their transport does.

        A fault that can be repaired is the answer, so that the group is not lost.
        """
        key = order.generation, order.restore_id
        fault = await self._background_task.poll(key, partial(self._restore_rows, order))
        return RestoreResult(in_progress=True) if fault is None else RestoreResult(fault)

    async def _restore_rows(self, order: RestoreRows) -> RankFault:
        rank = self._rank
        below = (
            []
            if self._data.is_on_run_host
            else select_rank_files(order.files, rank.rank, rank.ranks)
        )
        try:
            if below:
                with suppress(RowsMissing):  # rows may have another layout
                    await self._restore_from_files(order, below)
                    return RankFault()
            await self._restore_from_files(order, [STATE_FOLDER])
        except READ_FAULTS as error:
            return describe_fault(error)
        return RankFault()

    async def _restore_from_files(self, order: RestoreRows, below: Sequence[str]) -> None:
        mesh, run = self._mesh, self._mesh.host.run_blocking
        checked = self._data.is_on_run_host and order.rank0_host == mesh.settings.host
        listed = {} if checked else order.files
        files = open_checkpoint_files(mesh, self._bulk, self._data, order.checkpoint, listed, below)
        async with files as directory:
            saved = await run(
                SavedRows, directory / STATE_FOLDER, deadline_s=STATE_TRANSFER_TIMEOUT_S
            )
            own = self._rank.learner.get_rows(self._rank.learner.get_meta_tensors(False))
            fill = await make_row_filler(mesh, self._bulk, order.manifest, saved, own)
            await self._run(
                self._rank.learner.restore, saved, fill, deadline_s=self._rank.state_timeout_s
            )


class RowStager(_RowTask[StagingResult]):
    _number = 0
    _stager: VersionStager | None = None

    async def stage(self, order: StageRows) -> None:
        """Copy the ordered rows; another staging closes the one before."""
        if self._stager is None or order.staging_id != self._number:
            await self.close()
            how = StagingOptions(order.dtype, order.chunk_bytes, order.is_written)
            self._stager = VersionStager(self._mesh, self._bulk, how, order.description)
            self._number = order.staging_id
        stager = self._stager
        rows = partial(self._rank.learner.get_rows, order.tensor_names, order.part, order.parts)
        stager.start_writing(
            await self._run(stager.copy_rows, rows, deadline_s=STATE_TRANSFER_TIMEOUT_S)
        )

    async def finish(self, order: FinishStaging) -> StagingResult:
        """Return the staged rows once all are stored; RankLost if nothing was staged."""
        stager = self._stager
        if stager is None or order.staging_id != self._number:
            raise RankLost("this rank has no such staging", where=self._mesh.name)
        key = order.staging_id, order.wait_complete
        found = await self._background_task.poll(
            key, partial(self._finish_staging, stager, order.wait_complete)
        )
        if found is None:
            return StagingResult(in_progress=True)
        if not order.wait_complete:
            await self._background_task.close()  # the next call starts a new wait
        return found

    async def _finish_staging(self, stager: VersionStager, is_final: bool) -> StagingResult:
        if is_final:
            laid = await stager.finish()
            return StagingResult(laid.pieces, laid.published_parts, laid.masters_parts)
        await stager.wait_for_writes()
        return StagingResult()

    async def close(self) -> None:
        await super().close()
        stager, self._stager = self._stager, None
        if stager is not None:
            await stager.close()


@torch.no_grad()
def write_rows(
    rank: Rank, path: Path, names: Sequence[str], file_number: int, include_masters: bool
) -> None:
    """Write a rank's rows of some tensors to a file; rank 0 writes the replicated tensors."""
    own = rank.learner.get_checkpoint_rows(include_masters)
    parts = {name: own[name] for name in names if own[name].shape or not rank.rank}
    parts = {name: part for name, part in parts.items() if part.rows.numel()}
    if parts:
        save_rows(path, f"part-{rank.rank:05d}-{file_number:05d}.safetensors", parts)
