"""How a gang's state is saved: each rank writes its own rows to files of its own. Those of a rank
on another host come to the checkpoint's directory as chunks of the store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from common.api.ranks import MOVE_S, Ranks, RowsSaved, SaveRows
from common.base.errors import BadMessage, RankLost
from common.mesh.runtime.mesh import Mesh
from common.weights.bulk.port import BulkClient
from common.weights.store.weight_store import fetch_file
from services.trainer.compute.piece_runner import SAVE, PieceRunner, piece
from services.trainer.gang.group import RankGroup
from services.trainer.ranks.rank import Rank
from services.trainer.ranks.saving import write
from services.trainer.ranks.trouble import UNWRITABLE, raise_first, tried
from services.trainer.rows.saved import MASTER, sync_all


class GangSaving:
    """See `StateSaving`. Training waits until all rows are in files. RankLost once the group that
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
        self._check()
        host, scratch = self._mesh.settings.host, self._path.parent.name
        order = SaveRows(self._generation, host, scratch, self._masters, list(names), number)
        about = self._rank, self._path, names, number, self._masters
        own = partial(tried, UNWRITABLE, write, *about)
        here, there = await self._group.together(MOVE_S, Ranks.save, self._group.to_all(order), own)
        raise_first([here, *there])

    async def end(self) -> dict[str, str]:
        self._check()
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

    def _check(self) -> None:
        if self._group.current() != self._generation:
            raise self._group.loss(RankLost("the group has been formed anew"))


def check_own(rank: int, names: Iterable[str]) -> None:
    """Returns if these are files that a rank writes its own rows to; BadMessage names the first
    that is not: a rank decides on no other file of the core's host.
    """
    for name in names:
        if not re.fullmatch(rf"part-{rank:05d}-[0-9]{{5,}}\.safetensors", name):
            raise BadMessage(f"{name!r:.80} is no file of rank {rank}'s rows", where="trainer")
