"""Chooses where a core's arithmetic runs: in this process, or on a gang of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.job.config import AlgorithmConfig, OptimizerConfig
from common.runtime.mesh import Mesh
from services.trainer.arithmetic.learner import Learner
from services.trainer.arithmetic.packing import Bin
from services.trainer.arithmetic.stats import BinStats
from services.trainer.core import saved_state
from services.trainer.helpers.gradient_sum import GradientSum

COMPUTE_S = 3600.0  # deadline of one piece of arithmetic
SAVE_S = 3600.0

Round = Sequence[Bin]  # one for each rank


class Compute(Protocol):
    """Gradients of rounds are kept, by index, until `apply` adds them up in that order."""

    @property
    def ranks(self) -> int: ...
    @property
    def size(self) -> int:
        """Numbers in a flat gradient."""

    async def form(self) -> None:
        """All ranks meet, for the first time or after RankLost; weights are still to be given, but
        for those that the job begins with.
        """

    async def begin(self) -> None:
        """A step begins, or begins again: gradients that are kept are forgotten."""

    async def compute(self, index: int, round: Round) -> BinStats:
        """Computes and keeps the gradient sum of a round's bins."""

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        """Keeps what a hybrid computed of a round, flat, in the order of the parameters; the array
        belongs to it from then on.
        """

    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Steps are computed with these from now on, until a gang is formed anew."""

    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        """One optimizer step from the kept rounds 0 .. rounds - 1; the norm before clipping."""

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        """`logprobs` or `values` at each place of each bin, 0 where nothing is trained."""

    async def weights(self) -> dict[str, Tensor]:
        """The whole model's float32 master weights, by name; copies."""

    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Begins from these weights, with a new optimizer."""

    async def snapshot(self) -> Any:
        """What `write` takes: all that the next step depends on beside the weights; copies."""

    async def write(self, snapshot: Any, path: Path) -> None:
        """Makes a snapshot durable in the directory `path`, while training goes on."""

    async def restore(self, path: Path, weights: dict[str, Tensor]) -> None:
        """Goes on from what was written, on as many ranks as there are now."""


class LocalCompute:
    """One process, one learner."""

    ranks = 1

    def __init__(self, mesh: Mesh, learner: Learner) -> None:
        self._mesh, self.learner = mesh, learner
        self._gradients = GradientSum()
        self._busy = asyncio.Lock()  # one piece of arithmetic at a time

    @property
    def size(self) -> int:
        return self.learner.size

    async def form(self) -> None:
        """There is nobody to meet."""

    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        async with self._busy:
            await self._run(self.learner.load_weights, weights)

    async def begin(self) -> None:
        self._gradients = GradientSum()

    async def compute(self, index: int, round: Round) -> BinStats:
        (bin,), gradients = round, self._gradients
        async with self._busy:
            gradient, stats = await self._run(self.learner.gradient, bin)
        assert isinstance(stats, BinStats)
        await self._run(gradients.keep, index, gradient)
        return stats

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        there, gradients = torch.from_numpy(gradient), self._gradients
        await self._run(lambda: gradients.keep(index, there.to(self.learner.device)))

    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        async with self._busy:
            await self._run(self.learner.adopt, algorithm, optimizer)

    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        total = self._gradients.total(rounds)
        async with self._busy:
            norm: float = await self._run(self.learner.apply, total, denominator, lr_factor)
        await self.begin()
        return norm

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        async with self._busy:
            return [await self._run(self.learner.score, bin, what) for bin in bins]

    async def weights(self) -> dict[str, Tensor]:
        async with self._busy:
            copied: dict[str, Tensor] = await self._run(self.learner.copied_weights)
            return copied

    async def snapshot(self) -> dict[str, Tensor]:
        async with self._busy:
            copied: dict[str, Tensor] = await self._run(self.learner.optimizer_state)
            return copied

    async def write(self, snapshot: dict[str, Tensor], path: Path) -> None:
        await self._mesh.host.run_blocking(
            saved_state.save_state, path, snapshot, deadline_s=SAVE_S
        )

    async def restore(self, path: Path, weights: dict[str, Tensor]) -> None:
        async with self._busy:
            await self._run(self.learner.restore, path, weights)

    async def _run(self, work: Any, *args: Any) -> Any:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=COMPUTE_S)
