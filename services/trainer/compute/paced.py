"""A core's arithmetic slowed down to the pace of a declared accelerator: its numbers are the same,
its pieces padded.

So two cores can stand for several accelerators, as long as they compute faster than what they stand
for. What is padded is what the accelerator would be busy with: whoever holds its turn goes on
holding it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.clock import Clock
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.job.pace import LATE, TrainingPace
from common.runtime.residents.tiers import Keep, Take
from common.weights.laying import How
from services.trainer.arithmetic.stats import BinStats
from services.trainer.bins.division import Division
from services.trainer.bins.packing import Bin
from services.trainer.compute.compute import Compute, Round
from services.trainer.compute.saving import Saving
from services.trainer.compute.staging import Staging

T = TypeVar("T")


class Padding:
    """Makes pieces of work take what they would take at a pace, and counts those that took longer
    by more than LATE of it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps, self._late = 0, 0

    @property
    def late(self) -> dict[str, int]:
        """Pieces so far, and those of them that ended late."""
        return {"paced": self._steps, "late": self._late}

    async def take(self, seconds: float, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, no sooner than after so long."""
        clock = self._clock
        began = clock.monotonic()
        found = await work()
        left_s = began + seconds - clock.monotonic()
        if left_s > 0:
            await clock.sleep(left_s)
        self._steps += 1
        self._late += clock.monotonic() - began > (1.0 + LATE) * seconds
        return found


class PacedCompute:
    """See `Compute`. All ranks are equally fast: a round takes what its longest bin does."""

    def __init__(self, inner: Compute, pace: TrainingPace, clock: Clock) -> None:
        self._inner, self._pace = inner, pace
        self._padding = Padding(clock)

    @property
    def late(self) -> Mapping[str, int]:
        return self._padding.late

    @property
    def division(self) -> Division:
        return self._inner.division

    @property
    def size(self) -> int:
        return self._inner.size

    async def form(self) -> None:
        await self._inner.form()

    async def begin(self) -> None:
        await self._inner.begin()

    async def compute(self, index: int, round: Round) -> BinStats:
        seconds = self._pace.train_s(_longest(round))
        return await self._padding.take(seconds, lambda: self._inner.compute(index, round))

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        await self._inner.keep(index, gradient)

    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        await self._inner.adopt(algorithm, optimizer)

    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        return await self._padding.take(
            self._pace.update_s, lambda: self._inner.apply(rounds, denominator, lr_factor)
        )

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        at_once = self.division.scored
        rounds = [bins[i : i + at_once] for i in range(0, len(bins), at_once)]
        seconds = sum(self._pace.score_s(_longest(one)) for one in rounds)
        return await self._padding.take(seconds, lambda: self._inner.score(bins, what))

    @property
    def outline(self) -> Mapping[str, Tensor]:
        return self._inner.outline

    def staging(self, how: How, what: str) -> Staging:
        return self._inner.staging(how, what)

    def saving(self, path: Path, masters: bool) -> Saving:
        return self._inner.saving(path, masters)

    async def take(self, weights: dict[str, Tensor]) -> None:
        await self._inner.take(weights)

    async def taken(self) -> None:
        await self._inner.taken()

    async def restore(self, name: str, files: dict[str, str], manifest: str, path: Path) -> None:
        await self._inner.restore(name, files, manifest, path)

    @property
    def bytes(self) -> int:
        return self._inner.bytes

    async def sleep(self, about: dict[str, Any], keep: Keep) -> None:
        await self._inner.sleep(about, keep)

    async def wake(self, take: Take) -> None:
        await self._inner.wake(take)

    async def move(self, tier: str) -> None:
        await self._inner.move(tier)

    async def resume(self, about: Mapping[str, Any], take: Take) -> bool:
        return await self._inner.resume(about, take)


def _longest(round: Sequence[Bin]) -> int:
    return max(len(bin.tokens) for bin in round)
