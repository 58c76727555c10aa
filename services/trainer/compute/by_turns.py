"""A core's arithmetic as its gang and its sleep let it run: each piece takes the gang's turn, for
all ranks at once, and gives it back before anything else is waited for; none begins in its sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.errors import Damaged, RankLost
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.runtime.residents.tiers import Keep, Nap, Take
from common.runtime.residents.turns import Turns
from common.weights.laying import How, Laid
from services.trainer.arithmetic.stats import BinStats
from services.trainer.bins.division import Division
from services.trainer.bins.packing import Bin
from services.trainer.compute.compute import Compute, Round
from services.trainer.compute.pieces import Pieces
from services.trainer.compute.saving import Saving
from services.trainer.compute.staging import Staging


class ByTurns:
    """See `Compute`. What does not compute, forming, keeping a gradient, writing what was copied
    to a disk, takes no turn. It waits for its sleep to end before it asks for one.
    """

    def __init__(self, inner: Compute, turns: Turns, nap: Nap) -> None:
        """`nap` is told when it sleeps."""
        self._inner, self._turns, self._nap = inner, turns, nap
        self._pieces = Pieces()
        self._keeping = asyncio.Lock()  # a gradient is added; of this, too, there is none asleep
        self._lost: RankLost | None = None  # why there is no state to compute with

    @property
    def division(self) -> Division:
        return self._inner.division

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def late(self) -> Mapping[str, int]:
        return self._inner.late

    async def form(self) -> None:
        async with self._pieces.any():
            await self._inner.form()  # it waits for ranks, for minutes if need be
            self._lost = None

    async def begin(self) -> None:
        async with self._step():
            await self._inner.begin()

    async def compute(self, index: int, round: Round) -> BinStats:
        async with self._step():
            return await self._turns.run("train_step", lambda: self._inner.compute(index, round))

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        async with self._keeping:
            await self._inner.keep(index, gradient)

    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        async with self._any():
            await self._inner.adopt(algorithm, optimizer)

    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        async with self._step():
            return await self._turns.run(
                "train_step", lambda: self._inner.apply(rounds, denominator, lr_factor)
            )

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        """Others may have their turns between two rounds of bins."""
        found: list[NDArray[np.float32]] = []
        at_once = self.division.scored
        for start in range(0, len(bins), at_once):
            scoring = partial(self._inner.score, bins[start : start + at_once], what)
            async with self._step():
                found += await self._turns.run("score", scoring)
        return found

    @property
    def outline(self) -> Mapping[str, Tensor]:
        return self._inner.outline

    def staging(self, how: How, what: str) -> Staging:
        """Some rows take a turn at a time; to wait for the store takes none."""
        return StagingByTurns(self._inner.staging(how, what), self._any, self._turns)

    def saving(self, path: Path, masters: bool) -> Saving:
        """Some tensors take a turn at a time; to write what was copied takes none."""
        return SavingByTurns(self._inner.saving(path, masters), self._any, self._turns)

    async def take(self, weights: dict[str, Tensor]) -> None:
        async with self._any():
            await self._turns.run("sync", lambda: self._inner.take(weights))

    async def taken(self) -> None:
        async with self._any():
            await self._turns.run("sync", self._inner.taken)

    async def restore(self, name: str, files: dict[str, str], manifest: str, path: Path) -> None:
        async with self._any():
            await self._turns.run("sync", lambda: self._inner.restore(name, files, manifest, path))

    # -- sleep -----------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        return self._inner.bytes

    async def hold(self) -> None:
        """No piece of a step begins until `let_go`, and none runs any more: what is there stays as
        it is, and can be copied.
        """
        await self._pieces.hold()

    def let_go(self) -> None:
        """Steps go on."""
        self._pieces.let_go()

    async def sleep_as(self, about: Callable[[], dict[str, Any]], keep: Keep) -> None:
        """Sleeps between two pieces, with `about` it as it then stands; see `Compute.sleep`."""
        await self._pieces.stop()
        try:
            await self._keeping.acquire()
            try:
                await self._inner.sleep(about(), keep)
            except BaseException:
                self._keeping.release()
                raise
        except BaseException:
            self._pieces.go_on()
            raise
        self._nap.began()

    async def sleep(self, about: dict[str, Any], keep: Keep) -> None:
        await self.sleep_as(lambda: about, keep)

    async def wake(self, take: Take) -> None:
        """See `Compute.wake`. Damaged: RankLost for all that waits, and comes, until it is formed
        anew.
        """
        try:
            await self._inner.wake(take)
        except Damaged as error:
            self._lost = RankLost(
                f"what it kept while it slept is lost: {error}",
                fix="it goes on from the last committed step",
            )
            self._go_on()
            raise
        self._go_on()

    def _go_on(self) -> None:
        self._nap.ended()
        self._keeping.release()
        self._pieces.go_on()

    async def move(self, tier: str) -> None:
        await self._inner.move(tier)

    async def resume(self, about: Mapping[str, Any], take: Take) -> bool:
        async with self._any():
            return await self._inner.resume(about, take)

    @asynccontextmanager
    async def _any(self) -> AsyncIterator[None]:
        async with self._pieces.any():
            self._check()
            yield

    @asynccontextmanager
    async def _step(self) -> AsyncIterator[None]:
        async with self._pieces.step():
            self._check()
            yield

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost


class StagingByTurns:
    """See `Staging`: rows are copied as pieces of arithmetic are computed."""

    def __init__(
        self, inner: Staging, piece: Callable[[], AbstractAsyncContextManager[None]], turns: Turns
    ) -> None:
        self._inner, self._piece, self._turns = inner, piece, turns

    async def copy(self, names: Sequence[str], part: int, parts: int) -> None:
        async with self._piece():
            await self._turns.run("sync", lambda: self._inner.copy(names, part, parts))

    async def settled(self) -> None:
        await self._inner.settled()

    async def end(self) -> list[Laid]:
        return await self._inner.end()

    async def close(self) -> None:
        await self._inner.close()


class SavingByTurns:
    """See `Saving`: rows are copied as pieces of arithmetic are computed."""

    def __init__(
        self, inner: Saving, piece: Callable[[], AbstractAsyncContextManager[None]], turns: Turns
    ) -> None:
        self._inner, self._piece, self._turns = inner, piece, turns

    @property
    def outline(self) -> Mapping[str, Tensor]:
        return self._inner.outline

    async def copy(self, names: Sequence[str], number: int) -> None:
        async with self._piece():
            await self._turns.run("save", lambda: self._inner.copy(names, number))

    async def end(self) -> dict[str, str]:
        return await self._inner.end()
