"""Chooses where a core's arithmetic runs: in this process, or on a gang of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.base.errors import Damaged
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.mesh.residents.tiers import Keep, Take
from common.mesh.runtime.mesh import Mesh
from common.mesh.runtime.serial_executor import looked_at
from common.weights.bulk.port import BulkClient
from common.weights.layout.laying import How
from common.weights.staging import Stager
from services.trainer.arithmetic.gradient_sum import GradientSum
from services.trainer.arithmetic.learner import Learner
from services.trainer.arithmetic.memory import LearnerMemory, taken_again
from services.trainer.arithmetic.stats import BinStats
from services.trainer.bins.division import EvenDivision, RoundDivision
from services.trainer.bins.packing import Bin
from services.trainer.compute.piece_runner import (
    BEGIN,
    CHANGE,
    SCORE,
    SYNC,
    TRAIN,
    UPDATE,
    PieceRunner,
    piece,
)
from services.trainer.compute.saving import LocalSaving, StateSaving
from services.trainer.compute.staging import LocalStaging, WeightStaging
from services.trainer.rows.filling import masters_of
from services.trainer.rows.saved import SavedRows

COMPUTE_S = 3600.0  # deadline of one piece of arithmetic
SAVE_S = 3600.0

Round = Sequence[Bin]  # as many as the division says


class Compute(Protocol):
    """Gradients of rounds are kept, by index, until `apply` adds them up in that order."""

    @property
    def runner(self) -> PieceRunner:
        """What its pieces of arithmetic run in."""

    @property
    def division(self) -> RoundDivision:
        """How it computes rounds."""

    @property
    def size(self) -> int:
        """Numbers in a flat gradient."""

    @property
    def late(self) -> Mapping[str, int]:
        """`paced`, pieces at a pace so far, and `late`, those of them that ended late; empty where
        none is kept.
        """

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

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """The whole weights, of which only names, types and shapes are looked at."""

    def staging(self, how: How, what: str) -> WeightStaging:
        """How all of them are staged as they are when they are copied; RankLost without a gang."""

    def saving(self, path: Path, masters: bool) -> StateSaving:
        """How all that a checkpoint keeps of it is written below `path`, as it is when it is
        copied: what the next step depends on beside the weights, with `masters` these too.
        RankLost without a gang.
        """

    async def take(self, weights: dict[str, Tensor]) -> None:
        """Takes some whole weights; `taken` follows when all of them were given."""

    async def taken(self) -> None:
        """Goes on from the weights that were given, and with an optimizer that is new."""

    async def restore(self, name: str, files: dict[str, str], manifest: str, path: Path) -> None:
        """Goes on from a checkpoint whose state lies below `path`, and where that has no weights
        from the version of this manifest. Damaged or NotFound: the store does not hold that as it
        was written, and it is to be restored again.
        """

    # -- sleep: nothing else is asked of it from `sleep` to the end of `wake` --------------------

    @property
    def bytes(self) -> int:
        """That its tensors take on this process's accelerator now."""

    async def sleep(self, about: Callable[[], dict[str, Any]], keep: Keep) -> None:
        """Has all of it kept between two pieces, with what is said `about` it as it then stands,
        and frees its memory. As before when `keep` raises.
        """

    async def wake(self, take: Take) -> None:
        """Takes its memory and what was kept again. Damaged when what was kept is, and RankLost for
        all that waits, and comes, until it is formed anew; whatever else it raises, it sleeps on.
        """

    async def move(self, tier: str) -> None:
        """What others than this process have kept goes to a tier; once more changes nothing.
        Absent: nobody has need of it any more; accelerator: of what was awake there is.
        """

    async def resume(self, about: Mapping[str, Any], take: Take) -> bool:
        """Goes on from what another process has kept when it slept, and said about it. False, and
        its state is to be given otherwise, when that is of another kind, or damaged.
        """


class LocalCompute:
    """One process, one learner."""

    division: RoundDivision = EvenDivision()

    def __init__(self, mesh: Mesh, learner: Learner, runner: PieceRunner | None = None) -> None:
        self._mesh, self.learner = mesh, learner
        self.runner = runner or PieceRunner(mesh)
        self._bulk = BulkClient(mesh)
        self._gradients = GradientSum()
        self._memory: LearnerMemory | None = None  # of a learner that sleeps
        self._taken: dict[str, Tensor] = {}  # weights that it is given
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def size(self) -> int:
        return self.learner.size

    @property
    def late(self) -> Mapping[str, int]:
        return self.runner.late

    async def form(self) -> None:
        """There is nobody to meet."""
        async with self.runner.forming():
            return

    @piece(BEGIN)
    async def begin(self) -> None:
        self._gradients = GradientSum()

    @piece(TRAIN)
    async def compute(self, index: int, round: Round) -> BinStats:
        (bin,), gradients = round, self._gradients
        gradient, stats = await self._run(self.learner.gradient, bin)
        assert isinstance(stats, BinStats)
        await self._run(gradients.keep, index, gradient)
        return stats

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        async with self.runner.keeping:
            there, gradients = torch.from_numpy(gradient), self._gradients
            await self._run(lambda: gradients.keep(index, there.to(self.learner.device)))

    @piece(CHANGE)
    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        await self._run(self.learner.adopt, algorithm, optimizer)

    @piece(UPDATE)
    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        total = self._gradients.total(rounds)
        norm: float = await self._run(self.learner.apply, total, denominator, lr_factor)
        self._gradients = GradientSum()
        return norm

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        return [await self._score([bin], what) for bin in bins]

    @piece(SCORE)
    async def _score(self, bins: Sequence[Bin], what: str) -> NDArray[np.float32]:
        (bin,) = bins
        found: NDArray[np.float32] = await self._run(self.learner.score, bin, what)
        return found

    @property
    def outline(self) -> Mapping[str, Tensor]:
        return self.learner.weights()

    def staging(self, how: How, what: str) -> WeightStaging:
        stager = Stager(self._mesh, self._bulk, how, what)
        return LocalStaging(stager, self.learner, self.runner, self._run)

    def saving(self, path: Path, masters: bool) -> StateSaving:
        return LocalSaving(self.learner, self.runner, self._run, path, masters)

    @piece(SYNC)
    async def take(self, weights: dict[str, Tensor]) -> None:
        self._taken |= weights

    @piece(SYNC)
    async def taken(self) -> None:
        weights, self._taken = self._taken, {}
        await self._run(self.learner.load_weights, weights)

    @piece(SYNC)
    async def restore(self, name: str, files: dict[str, str], manifest: str, path: Path) -> None:
        saved = await self._run(SavedRows, path)
        own = self.learner.rows(self.learner.weights())
        fill = await masters_of(self._mesh, self._bulk, manifest, saved, own)
        await self._run(self.learner.restore, saved, fill)

    @property
    def bytes(self) -> int:
        return self.learner.bytes if self._memory is None else 0

    async def sleep(self, about: Callable[[], dict[str, Any]], keep: Keep) -> None:
        async with self.runner.falling_asleep():
            told = about() | {"counts": self.learner.counts()}
            await self._ended()
            memory = await self._run(LearnerMemory, self.learner, self._gradients.tensors())
            await keep(told, memory.kept)
            await self._run(memory.give_back)
            self._memory = memory

    async def wake(self, take: Take) -> None:
        memory = self._memory
        assert memory is not None, "it sleeps"
        async with self.runner.waking():
            await taken_again(memory, self._run, self._mesh.name)
            try:
                await take(memory.kept)
            except Damaged:
                self._memory = None
                raise
            except BaseException:
                await self._run(memory.give_back)
                raise
            await self._run(memory.filled)
            self._memory = None

    async def move(self, tier: str) -> None:
        """There are no others."""

    @piece(CHANGE)
    async def resume(self, about: Mapping[str, Any], take: Take) -> bool:
        memory = await self._run(LearnerMemory, self.learner)
        try:
            await take(memory.kept)
        except Damaged as error:
            self._mesh.telemetry.log.warning("not resumed", error=str(error))
            return False
        await self._run(self.learner.go_on, about["counts"])
        return True

    async def _run(self, work: Any, *args: Any) -> Any:
        """What `work` returns; a cancellation leaves it running, see `_ended`."""
        running = self._mesh.host.run_blocking(work, *args, deadline_s=COMPUTE_S)
        task = asyncio.create_task(running, name="arithmetic")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(looked_at)
        return await asyncio.shield(task)

    async def _ended(self) -> None:
        """Returns when nothing runs that nobody waits for any more."""
        if self._running:
            await asyncio.wait(self._running)
