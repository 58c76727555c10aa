"""How what a step depends on is saved, some at a time; here by a core of one process. The ranks of
a gang do so in `gang/saving.py`, each its own rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from common.weights.layout.laying import Part
from services.trainer.arithmetic.learner import Learner
from services.trainer.compute.piece_runner import SAVE, PieceRunner, piece
from services.trainer.rows.saved import FIRST, save_rows, sync_all

Run = Callable[..., Awaitable[Any]]  # runs what blocks


SAVE_S = 3600.0  # to write a checkpoint


class StateSaving(Protocol):
    """One checkpoint's state, below a directory of this host."""

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """All that is to be saved, of which only types and shapes are looked at."""

    async def copy(self, names: Sequence[str], number: int) -> None:
        """Takes some of it as it is now, as a piece; `number` differs from that of all others."""

    async def end(self) -> dict[str, str]:
        """Returns when all that was copied is durable: digests of the bytes as they were written,
        by files' names, where it knows them. StorageFull without room for it.
        """


class LocalSaving:
    """See `StateSaving`: copies in memory, so that training goes on while they are written."""

    def __init__(
        self, learner: Learner, runner: PieceRunner, run: Run, path: Path, masters: bool
    ) -> None:
        self._learner, self.runner, self._run = learner, runner, run
        self._path, self._masters = path, masters
        self._copies: dict[str, Part] = {}

    @property
    def outline(self) -> Mapping[str, Tensor]:
        return {name: part.rows for name, part in self._learner.saved(self._masters).items()}

    @piece(SAVE)
    async def copy(self, names: Sequence[str], number: int) -> None:
        self._copies |= await self._run(self._copied, names)

    def _copied(self, names: Sequence[str]) -> dict[str, Part]:
        own = self._learner.saved(self._masters)
        return {
            name: Part(own[name].shape, own[name].first, own[name].rows.to("cpu", copy=True))
            for name in names
        }

    async def end(self) -> dict[str, str]:
        digest = await self._run(save_rows, self._path, FIRST, self._copies)
        await self._run(sync_all, self._path)
        return {FIRST: digest}
