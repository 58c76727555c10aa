"""Writers of a core's state and staging of its weights, some tensors at a time.

In a gang each rank writes its own rows. Rows of other hosts arrive as chunks of the store.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from meshrl.common.api.ranks import (
    STATE_TRANSFER_TIMEOUT_S,
    FinishSaving,
    FinishStaging,
    Ranks,
    SaveRows,
    StageRows,
)
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import StagedRows, StagingOptions, TensorRows
from meshrl.common.weights.staging import VersionStager
from meshrl.common.weights.store.weight_store_client import fetch_file
from meshrl.services.trainer.compute.piece_runner import SAVE, SYNC, PieceRunner, run_as_piece
from meshrl.services.trainer.gang.rank_group import RankGroup
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_faults import WRITE_FAULTS, raise_first, run_and_report
from meshrl.services.trainer.ranks.row_tasks import write_rows
from meshrl.services.trainer.rows.saved_rows import FIRST_FILE, MASTER_PREFIX, save_rows, sync_files

_staging_numbers = itertools.count(1)
RunBlocking = Callable[..., Awaitable[Any]]  # runs blocking work


class LocalStateWriter:
    """Writer of one checkpoint's state for a core of one process: copies, then a file of them."""

    def __init__(
        self,
        learner: Learner,
        runner: PieceRunner,
        run: RunBlocking,
        path: Path,
        include_masters: bool,
    ) -> None:
        self._learner, self.runner, self._run = learner, runner, run
        self._path, self._include_masters = path, include_masters
        self._copies: dict[str, TensorRows] = {}

    @property
    def meta_tensors(self) -> Mapping[str, Tensor]:
        """Meta tensors of all that is saved: only their dtypes and shapes are read."""
        return get_meta_tensors(self._learner, self._include_masters)

    @run_as_piece(SAVE)
    async def copy(self, names: Sequence[str], file_number: int) -> None:
        """Copy some tensors as they are now, as a piece; `file_number` is unique per call."""

        def copied() -> dict[str, TensorRows]:
            own = self._learner.get_checkpoint_rows(self._include_masters)
            return {
                name: TensorRows(
                    own[name].shape, own[name].first_row, own[name].rows.to("cpu", copy=True)
                )
                for name in names
            }

        self._copies |= await self._run(copied)

    async def finish(self) -> dict[str, str]:
        """Write the copies durably; return known digests of the written bytes by file name.

        Raise StorageFull without enough disk space.
        """
        digest = await self._run(save_rows, self._path, FIRST_FILE, self._copies)
        await self._run(sync_files, self._path)
        return {FIRST_FILE: digest}


class GangStateWriter:
    """Writer of a gang's state, see `LocalStateWriter`; training waits until all rows are in files.

    It raises RankLost once the group of its creation is lost.
    """

    def __init__(
        self,
        mesh: Mesh,
        runner: PieceRunner,
        group: RankGroup,
        rank: Rank,
        path: Path,
        include_masters: bool,
    ) -> None:
        """Create a writer; `path` is the state's directory in the checkpoint's scratch
        directory.
        """
        self._mesh, self._group, self._rank = mesh, group, rank
        self.runner = runner
        self._path, self._include_masters = path, include_masters
        self._bulk = BulkClient(mesh)
        self._generation = group.require_generation()

    @property
    def meta_tensors(self) -> Mapping[str, Tensor]:
        return get_meta_tensors(self._rank.learner, self._include_masters)

    @run_as_piece(SAVE)
    async def copy(self, names: Sequence[str], file_number: int) -> None:
        self._group.check_generation(self._generation)
        host, scratch = self._mesh.settings.host, self._path.parent.name
        order = SaveRows(
            self._generation, host, scratch, self._include_masters, list(names), file_number
        )
        about = self._rank, self._path, names, file_number, self._include_masters
        own = partial(run_and_report, WRITE_FAULTS, write_rows, *about)
        here, there = await self._group.run_on_all(
            STATE_TRANSFER_TIMEOUT_S, Ranks.save_rows, self._group.repeat_order(order), own
        )
        raise_first([here, *there])

    async def finish(self) -> dict[str, str]:
        self._group.check_generation(self._generation)
        order = FinishSaving(self._generation, self._mesh.settings.host, self._path.parent.name)
        orders = self._group.repeat_order(order)
        answers = await self._group.run_guarded(self._group.call_all(Ranks.finish_saving, orders))
        raise_first(answer.fault for answer in answers)
        for rank, answer in enumerate(answers, 1):
            check_rank_files(rank, answer.files)
            for name, digest in answer.files.items():
                description = f"{name} of another rank's state"
                await fetch_file(self._mesh, self._bulk, digest, self._path / name, description)
        await self._mesh.host.run_blocking(
            sync_files, self._path, deadline_s=STATE_TRANSFER_TIMEOUT_S
        )
        return {}


def get_meta_tensors(learner: Learner, include_masters: bool) -> dict[str, Tensor]:
    """Return the meta tensors of a checkpoint's state, with float32 weights if requested."""
    weights = learner.get_meta_tensors(False).items() if include_masters else ()
    state = learner.get_meta_tensors(True)
    return {**state, **{MASTER_PREFIX + name: tensor for name, tensor in weights}}


def check_rank_files(rank: int, names: Iterable[str]) -> None:
    """Check that a rank writes its own rows to these files; raise BadMessage for the first other.

    A rank must not choose any other file of the core's host.
    """
    for name in names:
        if not re.fullmatch(rf"part-{rank:05d}-[0-9]{{5,}}\.safetensors", name):
            raise BadMessage(
                f"{name!r:.80} is not the name of a file of rank {rank}'s rows", where="trainer"
            )


class GangStaging:
    """Staging of one version's rows; raises RankLost once the group of its creation is lost.

    Always `close` it; a staging without `finish` is abandoned then.
    """

    def __init__(
        self,
        runner: PieceRunner,
        group: RankGroup,
        rank: Rank,
        stager: VersionStager,
        options: StagingOptions,
        description: str,
    ) -> None:
        self.runner = runner
        self._group, self._rank, self._stager = group, rank, stager
        self._options, self._description = options, description
        self._generation, self._number = group.require_generation(), next(_staging_numbers)

    @run_as_piece(SYNC)
    async def copy(self, names: Sequence[str], part_index: int, part_count: int) -> None:
        """Copy part `part_index` of `part_count` of some weights' rows, to be written later."""
        how = self._options.dtype, self._options.max_chunk_bytes, self._options.write_chunks
        self._group.check_generation(self._generation)
        order = StageRows(
            self._generation,
            self._number,
            *how,
            self._description,
            list(names),
            part_index,
            part_count,
        )
        rows = partial(self._rank.learner.get_rows, names, part_index, part_count)
        chunks, _ = await self._group.run_on_all(
            STATE_TRANSFER_TIMEOUT_S,
            Ranks.stage_rows,
            self._group.repeat_order(order),
            self._stager.copy_rows,
            rows,
        )
        self._stager.start_writing(chunks)

    async def wait_until_written(self) -> None:
        await self._finish_on_all(is_final=False)

    async def finish(self) -> list[StagedRows]:
        """Return the rows that each process has staged, once all are in the store."""
        return await self._finish_on_all(is_final=True)

    async def _finish_on_all(self, is_final: bool) -> list[StagedRows]:
        self._group.check_generation(self._generation)
        own = self._stager.finish() if is_final else self._stager.wait_for_writes()
        orders = self._group.repeat_order(FinishStaging(self._generation, self._number, is_final))
        rank_calls = self._group.run_guarded(self._group.call_all(Ranks.finish_staging, orders))
        own_rows, other_rows = await asyncio.gather(own, rank_calls)
        if own_rows is None:
            return []
        return [
            own_rows,
            *(
                StagedRows(one.pieces, one.published_identity, one.masters_identity)
                for one in other_rows
            ),
        ]

    async def close(self) -> None:
        """Close this rank's staging; other ranks abandon theirs when the next staging begins."""
        await self._stager.close()
