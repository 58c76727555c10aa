"""Runs a core's arithmetic on a gang of ranks: this process is rank 0, and the others follow it.

What it orders of them runs on all ranks at once; see `RankGroup`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.ranks import (
    ADOPT_S,
    COMPUTE_S,
    MOVE_S,
    Adopt,
    RankOrder,
    Ranks,
    Rest,
    RestoreRows,
    RoundPart,
    ScorePart,
    Taking,
    Update,
)
from meshrl.common.base.errors import Damaged, MeshError, Refused, StateUnavailable, StorageFull
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.residents.tiers import Keep, Take
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.mesh.runtime.tasks import first_of
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.laying import How
from meshrl.common.weights.staging import Stager
from meshrl.common.weights.ways.meeting import meetings_of
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.arithmetic.memory import LearnerMemory, taken_again
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.division import Round
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.piece_runner import (
    BEGIN,
    CHANGE,
    SCORE,
    SYNC,
    TRAIN,
    UPDATE,
    PieceRunner,
    piece,
)
from meshrl.services.trainer.gang.group import RankGroup
from meshrl.services.trainer.gang.lending import Lending
from meshrl.services.trainer.gang.saving import GangSaving, GangStaging, LocalSaving
from meshrl.services.trainer.ranks.rank import Rank, filler
from meshrl.services.trainer.ranks.trouble import UNREADABLE, raise_first, tried
from meshrl.services.trainer.rows.filling import masters_of
from meshrl.services.trainer.rows.saved import SavedRows

T = TypeVar("T")

LOOK_S = 1.0  # between two looks whether a rank has ended

_numbers = itertools.count(1)  # of restorings


class Compute:
    """Gradients of rounds, kept until `apply` adds them up; a gang is to be formed first."""

    def __init__(
        self,
        mesh: Mesh,
        job: str,
        rank: Rank,
        runner: PieceRunner | None = None,
        meetings: Path | None = None,
        group_s: float = COMPUTE_S,
    ) -> None:
        """`meetings`: where ranks meet, else as the host says. `group_s`: their deadline."""
        meetings = meetings or meetings_of(mesh.settings)
        self.runner = runner or PieceRunner(mesh)
        self.division = rank.division
        self._mesh, self._rank = mesh, rank
        self._bulk = BulkClient(mesh)
        self._lending = Lending(mesh, job, rank.ranks, meetings)
        about = mesh, job, rank, meetings, group_s
        self._group = RankGroup(*about, prepare=self._lending.begin, ended=self._ended)
        self._claimed: set[int] = set()  # rounds whose gradient is kept or on its way
        self._sending: set[asyncio.Task[Any]] = set()
        self._memory: LearnerMemory | None = None  # of this rank's rows while all sleep
        self._about: dict[str, Any] = {}  # what was said of them

    @property
    def alone(self) -> Learner | None:
        return None if self._group.others else self._rank.learner

    @property
    def size(self) -> int:
        return self._rank.learner.size

    @property
    def late(self) -> Mapping[str, int]:
        """`paced`, pieces at a pace so far, and `late`, those that ended late; or nothing."""
        return self.runner.late or self._rank.late

    async def form(self) -> None:
        """Meet all ranks, first or after RankLost; weights that differ are still to be given."""
        async with self.runner.forming():
            await self._group.form()  # it waits for ranks, for minutes if need be
            self._claimed.clear()

    def _ended(self) -> None:
        self._memory = None
        for task in self._sending - {asyncio.current_task()}:  # one may be why
            task.cancel()
        self._sending.clear()

    # -- orders ----------------------------------------------------------------------------------

    @piece(BEGIN)
    async def begin(self) -> None:
        """A step begins, or begins again: gradients that are kept are forgotten."""
        self._claimed.clear()
        await self._all_sent()
        orders = self._group.to_all(RankOrder(self._group.current()))
        self._rank.begin()
        await self._group.or_lost(self._group.ask_all(Ranks.begin, orders))

    @piece(TRAIN)
    async def compute(self, index: int, round: Round) -> BinStats:
        """Computes and keeps the gradient sum of a round's bins."""
        if index in self._claimed:  # by a hybrid: all ranks must keep the same one first
            await self._all_sent()
        self._claimed.add(index)
        like = next((bin for bin in round if bin.trained), round[0])
        own, *rest = self.division.dealt([bin if bin.trained else filler(like) for bin in round])
        generation = self._group.current()
        parts = [RoundPart(generation, index, [bin.to_arrays() for bin in of]) for of in rest]
        here, others = await self._group.together(
            COMPUTE_S, Ranks.compute, parts, self._rank.compute, index, own
        )
        found = [*here, *(BinStats(**stats) for other in others for stats in other.stats)]
        counted = (stats for stats, bin in zip(found, round, strict=True) if bin.trained)
        return sum(counted, BinStats())

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        """Keeps what a hybrid computed of a round, flat, in the order of the parameters; the array
        belongs to it from then on. It is dropped if the ranks compute that round themselves: theirs
        is the same, and all of them must keep the same one.
        """
        async with self.runner.keeping:
            if index in self._claimed:
                return
            self._claimed.add(index)
            generation = self._group.current()

            async def send_to_all() -> None:
                keep = self._rank.keeping()
                cut = self._rank.learner.own_part
                async with self._lending.lent(generation, index, gradient, cut) as orders:
                    await self._mesh.host.run_blocking(keep, index, gradient, deadline_s=MOVE_S)
                    await self._group.ask_all(Ranks.keep, orders)

            task = asyncio.create_task(self._group.or_lost(send_to_all()))
            task.add_done_callback(looked_at)
            self._sending.add(task)  # until `apply`; a hybrid does not wait for it

    @piece(CHANGE)
    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Steps are computed with these from now on, until a gang is formed anew."""
        order = Adopt(self._group.current(), asdict(algorithm), asdict(optimizer))
        orders = self._group.to_all(order)
        await self._group.together(
            ADOPT_S, Ranks.adopt, orders, self._rank.learner.adopt, algorithm, optimizer
        )

    @piece(UPDATE)
    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        """One optimizer step from the kept rounds 0 .. rounds - 1; the norm before clipping."""
        await self._all_sent()
        about = rounds, denominator, lr_factor
        orders = self._group.to_all(Update(self._group.current(), *about))
        norm, _ = await self._group.together(
            COMPUTE_S, Ranks.apply, orders, self._rank.apply, *about
        )
        self._claimed.clear()
        return norm

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        """`logprobs` or `values` at each place of each bin, 0 where nothing is trained."""
        found: list[NDArray[np.float32]] = []
        at_once = self.division.scored
        for start in range(0, len(bins), at_once):
            found += await self._score(bins[start : start + at_once], what)
        return found

    @piece(SCORE)
    async def _score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        own, *rest = [*bins, *[filler(bins[0])] * (self._rank.ranks - len(bins))]
        generation = self._group.current()
        parts = [ScorePart(generation, bin.to_arrays(), what) for bin in rest]
        here, others = await self._group.together(
            COMPUTE_S, Ranks.score, parts, self._rank.score, own, what
        )
        return [here, *(other.scores for other in others)][: len(bins)]

    async def _all_sent(self) -> None:
        """Returns when the gradients of hybrids are where they belong."""
        sending = list(self._sending)
        if sending:
            await asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION)
        for task in sending:
            if task.done() and not task.cancelled():
                task.result()
        self._sending.difference_update(sending)

    @property
    def outline(self) -> Mapping[str, Tensor]:
        return self._rank.learner.outline(False)

    def staging(self, how: How, what: str) -> GangStaging:
        """How all of them are staged as they are when they are copied; RankLost without a gang."""
        stager = Stager(self._mesh, self._bulk, how, what)
        return GangStaging(self.runner, self._group, self._rank, stager, how, what)

    def saving(self, path: Path, masters: bool) -> LocalSaving | GangSaving:
        """How all that a checkpoint keeps of it is written below `path`, as it is when it is
        copied: what the next step depends on beside the weights, with `masters` these too.
        RankLost without a gang.
        """
        if (learner := self.alone) is not None:
            return LocalSaving(learner, self.runner, self._blocking, path, masters)
        return GangSaving(self._mesh, self.runner, self._group, self._rank, path, masters)

    @piece(SYNC)
    async def take(self, weights: dict[str, Tensor]) -> None:
        """Goes on from these whole weights, all of them, and with an optimizer that is new."""
        names = list(weights)
        orders = self._group.to_all(Taking(self._group.current(), names))
        await self._group.together(
            MOVE_S, Ranks.take, orders, self._rank.learner.take, names, weights
        )

    @piece(SYNC)
    async def restore(self, name: str, files: dict[str, str], manifest: str, path: Path) -> None:
        """Goes on from a checkpoint whose state lies below `path`, and where that has no weights
        from the version of this manifest. Damaged or NotFound: the store does not hold that as it
        was written, and it is to be restored again.
        """
        host = self._mesh.settings.host
        number = next(_numbers)
        order = RestoreRows(self._group.current(), number, host, name, files, manifest)
        run = self._mesh.host.run_blocking
        saved = await run(SavedRows, path, deadline_s=MOVE_S)
        own = self._rank.learner.rows(self._rank.learner.outline(False))
        fill = await masters_of(self._mesh, self._bulk, manifest, saved, own)
        orders = self._group.to_all(order)
        restore = partial(tried, UNREADABLE, self._rank.learner.restore, saved, fill)
        here, there = await self._group.together(MOVE_S, Ranks.restore, orders, restore)
        raise_first([here, *(answer.trouble for answer in there)])

    # -- sleep: every rank keeps its own rows, all of them or none ------------------------------

    @property
    def bytes(self) -> int:
        return self._rank.bytes if self._memory is None else 0

    async def sleep(self, about: Callable[[], dict[str, Any]], keep: Keep) -> None:
        """Have all of it kept, with what `about` tells, and free its memory; or stay as before."""
        async with self.runner.falling_asleep():
            told = about() | {"counts": self._rank.learner.counts()}
            await self._all_sent()
            memory = await self._blocking(self._rank.memory, True)
            try:
                await all_of(keep(told, memory.kept), self._rest("keep", told))
            except BaseException:
                with suppress(MeshError):
                    await self._rest("discard", told)
                raise
            await self._group.or_lost(self._rest("release", told))
            await self._blocking(memory.give_back)
            self._memory, self._about = memory, told

    async def wake(self, take: Take) -> None:
        """Takes its memory and what was kept again. Damaged when what was kept is, and RankLost for
        all that waits, and comes, until it is formed anew; whatever else it raises, it sleeps on.
        """
        async with self.runner.waking():
            memory, about = self._memory, self._about
            assert memory is not None, "it sleeps"
            try:
                await all_of(self._take_own(memory, take), self._rest("take", about))
            except BaseException as error:
                sleeps_on = Refused, StorageFull, StateUnavailable
                gone = self._group.others and not isinstance(error, sleeps_on)
                if not isinstance(error, MeshError if gone else Damaged):
                    await self._rest("release", about)  # it sleeps on, all ranks of it
                    await self._blocking(memory.give_back)
                    raise
                self._memory = None
                lost = await self._group.lost(error)
                raise Damaged(str(lost), where=self._mesh.name) from error
            self._memory = None
            with suppress(MeshError):
                await self._rest("forget", about)

    async def _take_own(self, memory: LearnerMemory, take: Take) -> None:
        await taken_again(memory, self._blocking, self._mesh.name)
        await take(memory.kept)
        await self._blocking(memory.filled)

    async def move(self, tier: str) -> None:
        """What others than this process have kept goes to a tier; once more changes nothing.
        Absent: nobody has need of it any more; accelerator: of what was awake there is.
        """
        about = self._about | {"tier": tier}
        if tier != Tier.ABSENT:
            await self._rest("move", about)
            return
        order = self._order("move", about)
        # Each has answered then, or has ended: it may, as soon as it has heard of it.
        ends = [
            first_of([other.call(Ranks.rest, order), self._until_ended(other.name)])
            for other in self._group.others
        ]
        await all_of(*ends)

    async def _until_ended(self, name: str) -> None:
        while True:
            await self._mesh.clock.sleep(LOOK_S)
            with suppress(StateUnavailable):
                entry = await registry.lookup(self._mesh.state, name)
                if entry is None or not entry.alive:
                    return

    @piece(CHANGE)
    async def resume(self, about: Mapping[str, Any], take: Take) -> bool:
        """Go on from what a process has kept and told; False if that is of no use here."""
        told = dict(about)
        try:
            memory = await self._blocking(self._rank.memory, False)
            await all_of(take(memory.kept), self._rest("resume", told))
        except MeshError as error:
            self._mesh.telemetry.log.warning("not resumed", error=str(error))
            return False
        finally:
            with suppress(MeshError):
                await self._rest("forget", told)
        await self._blocking(self._rank.learner.go_on, about["counts"])
        return True

    async def _rest(self, what: str, about: dict[str, Any]) -> None:
        """Orders it of all others; the first error of any."""
        order = self._order(what, about)
        await all_of(*(other.call(Ranks.rest, order) for other in self._group.others))

    async def _blocking(self, work: Callable[..., T], *args: Any) -> T:
        """Return what `work` returns, on the thread of this rank's arithmetic."""
        return await self._group.thread.run(work, *args, deadline_s=MOVE_S)

    def _order(self, what: str, about: dict[str, Any]) -> Rest:
        return Rest(self._group.current(), what, about["tier"], about)


async def all_of(*asked: Awaitable[Any]) -> None:
    """Waits for all of them; raises the first error of any."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
