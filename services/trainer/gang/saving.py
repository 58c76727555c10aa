"""How a core's state is saved and its weights are staged, some at a time: of a gang each rank's own
rows, which come from another host as chunks of the store.
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

from meshrl.common.api.ranks import MOVE_S, Ranks, RowsSaved, RowsStaged, SaveRows, StageRows
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.laying import How, Laid, Part
from meshrl.common.weights.staging import Stager
from meshrl.common.weights.store.weight_store import fetch_file
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.compute.piece_runner import SAVE, SYNC, PieceRunner, piece
from meshrl.services.trainer.gang.group import RankGroup
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.saving import write
from meshrl.services.trainer.ranks.trouble import UNWRITABLE, raise_first, tried
from meshrl.services.trainer.rows.saved import FIRST, MASTER, save_rows, sync_all

_numbers = itertools.count(1)  # of stagings
Run = Callable[..., Awaitable[Any]]  # runs what blocks


class LocalSaving:
    """Of one checkpoint of a core of one process: copies in memory, then a file of them."""

    def __init__(
        self, learner: Learner, runner: PieceRunner, run: Run, path: Path, masters: bool
    ) -> None:
        self._learner, self.runner, self._run = learner, runner, run
        self._path, self._masters = path, masters
        self._copies: dict[str, Part] = {}

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """All that is to be saved, of which only types and shapes are looked at."""
        return {name: part.rows for name, part in self._learner.saved(self._masters).items()}

    @piece(SAVE)
    async def copy(self, names: Sequence[str], number: int) -> None:
        """Takes some of it as it is now, as a piece; `number` differs from that of all others."""

        def copied() -> dict[str, Part]:
            own = self._learner.saved(self._masters)
            return {
                name: Part(own[name].shape, own[name].first, own[name].rows.to("cpu", copy=True))
                for name in names
            }

        self._copies |= await self._run(copied)

    async def end(self) -> dict[str, str]:
        """Returns when all that was copied is durable: digests of the bytes as they were written,
        by files' names, where it knows them. StorageFull without room for it.
        """
        digest = await self._run(save_rows, self._path, FIRST, self._copies)
        await self._run(sync_all, self._path)
        return {FIRST: digest}


class GangSaving:
    """See `LocalSaving`. Training waits until all rows are in files. RankLost once the group that
    has them now is none any more.
    """

    def __init__(
        self,
        mesh: Mesh,
        runner: PieceRunner,
        group: RankGroup,
        rank: Rank,
        path: Path,
        masters: bool,
    ) -> None:
        """`path`: the directory of the state, in a scratch directory of the checkpoint."""
        self._mesh, self._group, self._rank = mesh, group, rank
        self.runner = runner
        self._path, self._masters = path, masters
        self._bulk = BulkClient(mesh)
        self._generation = group.current()

    @property
    def outline(self) -> Mapping[str, Tensor]:
        weights = self._rank.learner.outline(False).items() if self._masters else ()
        return {**self._rank.learner.outline(True), **{MASTER + name: t for name, t in weights}}

    @piece(SAVE)
    async def copy(self, names: Sequence[str], number: int) -> None:
        self._group.check(self._generation)
        host, scratch = self._mesh.settings.host, self._path.parent.name
        order = SaveRows(self._generation, host, scratch, self._masters, list(names), number)
        about = self._rank, self._path, names, number, self._masters
        own = partial(tried, UNWRITABLE, write, *about)
        here, there = await self._group.together(MOVE_S, Ranks.save, self._group.to_all(order), own)
        raise_first([here, *there])

    async def end(self) -> dict[str, str]:
        self._group.check(self._generation)
        order = RowsSaved(self._generation, self._mesh.settings.host, self._path.parent.name)
        orders = self._group.to_all(order)
        answers = await self._group.or_lost(self._group.ask_all(Ranks.saved, orders))
        raise_first(answer.trouble for answer in answers)
        for rank, answer in enumerate(answers, 1):
            check_own(rank, answer.files)
            for name, digest in answer.files.items():
                said = f"{name} of another rank's state"
                await fetch_file(self._mesh, self._bulk, digest, self._path / name, said)
        await self._mesh.host.run_blocking(sync_all, self._path, deadline_s=MOVE_S)
        return {}


def check_own(rank: int, names: Iterable[str]) -> None:
    """Returns if these are files that a rank writes its own rows to; BadMessage names the first
    that is not: a rank decides on no other file of the core's host.
    """
    for name in names:
        if not re.fullmatch(rf"part-{rank:05d}-[0-9]{{5,}}\.safetensors", name):
            raise BadMessage(f"{name!r:.80} is no file of rank {rank}'s rows", where="trainer")


class GangStaging:
    """One staging, from the first rows to the last; RankLost once the group that has them now is
    none any more. `close` it whatever happens; what was not `end`ed is given up then.
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
        """Copy part number `part` of `parts` of some weights' rows, to be written meanwhile."""
        how = self._how.dtype, self._how.chunk_bytes, self._how.write
        self._group.check(self._generation)
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
        """What each process has staged, once all of it is in the store."""
        return await self._all(whole=True)

    async def _all(self, whole: bool) -> list[Laid]:
        self._group.check(self._generation)
        own = self._stager.end() if whole else self._stager.settled()
        orders = self._group.to_all(RowsStaged(self._generation, self._number, whole))
        asked = self._group.or_lost(self._group.ask_all(Ranks.staged, orders))
        here, there = await asyncio.gather(own, asked)
        if here is None:
            return []
        return [here, *(Laid(one.pieces, one.image, one.masters) for one in there)]

    async def close(self) -> None:
        """Ranks give up what is not ended when the next staging begins."""
        await self._stager.close()
