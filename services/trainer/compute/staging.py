"""How a core's weights are staged, some at a time; here by a core of one process. The ranks of a
gang do so in `gang/staging.py`, each its own rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from common.weights.layout.laying import Laid
from common.weights.staging import Stager
from services.trainer.arithmetic.learner import Learner
from services.trainer.compute.piece_runner import SYNC, PieceRunner, piece

Run = Callable[..., Awaitable[Any]]  # runs what blocks, as the arithmetic of its learner


class WeightStaging(Protocol):
    """One staging, from the first rows to the last. `close` it whatever happens; what was not
    `end`ed is given up then.
    """

    async def copy(self, names: Sequence[str], part: int, parts: int) -> None:
        """Copies part number `part` of `parts` of the rows of some weights; they go on being
        written.
        """

    async def settled(self) -> None:
        """Returns when there is room for more."""

    async def end(self) -> list[Laid]:
        """What each process has staged, once all of it is in the store."""

    async def close(self) -> None: ...


class LocalStaging:
    """See `WeightStaging`: of a learner that has all rows."""

    def __init__(self, stager: Stager, learner: Learner, runner: PieceRunner, run: Run) -> None:
        self._stager, self._learner = stager, learner
        self.runner, self._run = runner, run

    @piece(SYNC)
    async def copy(self, names: Sequence[str], part: int, parts: int) -> None:
        rows = partial(self._learner.rows, names, part, parts)
        self._stager.write(await self._run(self._stager.lay, rows))

    async def settled(self) -> None:
        await self._stager.settled()

    async def end(self) -> list[Laid]:
        return [await self._stager.end()]

    async def close(self) -> None:
        await self._stager.close()
