"""The actor of a rank beside the first: it does what the core orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from common.api.ranks import (
    ADOPT_S,
    COMPUTE_S,
    FORM_S,
    MOVE_S,
    Adopt,
    Done,
    LentGradient,
    Meeting,
    Norm,
    Order,
    Ranks,
    RoundPart,
    RoundStats,
    ScorePart,
    Scores,
    Taking,
    Update,
)
from common.api.role import Drain, Drained
from common.errors import Fenced
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh
from services.trainer.arithmetic.packing import Bin
from services.trainer.helpers.gradient_transfer import read
from services.trainer.ranks.rank import Rank
from services.trainer.ranks.thread import RankThread

T = TypeVar("T")


class RankActor(Actor):
    """Obeys the newest core: an order of an earlier generation is refused."""

    interface = Ranks

    def __init__(
        self, mesh: Mesh, job: str, gang: str, epoch: int, rank: Rank, group_s: float
    ) -> None:
        self._mesh, self._rank = mesh, rank
        self._about = {"job": job, "gang": gang, "epoch": epoch, "rank": rank.rank, "ready": True}
        self._generation = 0
        self._thread = RankThread(mesh, group_s)
        self._drained = asyncio.Event()

    def stats(self) -> dict[str, Any]:
        return {**self._about, "generation": self._generation}

    @call(Ranks.drain)
    def drain(self, request: Drain) -> Drained:
        """The core repeats the step on the gang that comes next."""
        self._drained.set()
        return Drained()

    async def until_drained(self) -> None:
        await self._drained.wait()

    @call(Ranks.stand_by)
    async def stand_by(self, order: Order) -> Done:
        if order.generation < self._generation:
            raise self._fenced(order.generation)
        self._generation = order.generation
        await self._thread.leave(self._rank.leave)
        await self._thread.ended()
        return Done()

    @call(Ranks.form)
    async def form(self, meeting: Meeting) -> Done:
        self._check(meeting.generation)
        await self._work(FORM_S, self._rank.form, Path(meeting.path), meeting.deadline_s)
        return Done()

    @call(Ranks.begin)
    def begin(self, order: Order) -> Done:
        self._check(order.generation)
        self._rank.begin()
        return Done()

    @call(Ranks.compute)
    async def compute(self, part: RoundPart) -> RoundStats:
        self._check(part.generation)
        bin = Bin.from_arrays(part.bin)
        stats = await self._work(COMPUTE_S, self._rank.compute, part.index, bin)
        return RoundStats(asdict(stats))

    @call(Ranks.keep)
    async def keep(self, lent: LentGradient) -> Done:
        self._check(lent.generation)
        keep = self._rank.keeping()

        def take() -> None:
            keep(lent.index, read(lent.path, lent.size))

        await self._mesh.host.run_blocking(take, deadline_s=MOVE_S)
        return Done()

    @call(Ranks.adopt)
    async def adopt(self, order: Adopt) -> Done:
        self._check(order.generation)
        settings = AlgorithmConfig(**order.algorithm), OptimizerConfig(**order.optimizer)
        await self._work(ADOPT_S, self._rank.adopt, *settings)
        return Done()

    @call(Ranks.apply)
    async def apply(self, update: Update) -> Norm:
        self._check(update.generation)
        norm = await self._work(
            COMPUTE_S, self._rank.apply, update.rounds, update.denominator, update.lr_factor
        )
        return Norm(norm)

    @call(Ranks.score)
    async def score(self, part: ScorePart) -> Scores:
        self._check(part.generation)
        bin = Bin.from_arrays(part.bin)
        return Scores(await self._work(COMPUTE_S, self._rank.score, bin, part.what))

    @call(Ranks.gather)
    async def gather(self, taking: Taking) -> Done:
        self._check(taking.generation)
        await self._work(MOVE_S, self._rank.gather, taking.optimizer)
        return Done()

    @call(Ranks.take)
    async def take(self, taking: Taking) -> Done:
        self._check(taking.generation)
        await self._work(MOVE_S, self._rank.take, None, None, taking.optimizer)
        return Done()

    async def _work(self, deadline_s: float, work: Callable[..., T], *args: Any) -> T:
        return await self._thread.run(work, *args, deadline_s=deadline_s)

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise self._fenced(generation)

    def _fenced(self, generation: int) -> Fenced:
        return Fenced(
            f"an order of generation {generation}; this rank is in {self._generation}",
            where=self._mesh.name,
        )
