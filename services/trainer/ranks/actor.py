"""The actor of a rank beside the first: it does what the core orders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from meshrl.common.api import ranks as orders
from meshrl.common.api.calls.role import Settle, Settled
from meshrl.common.api.ranks import ADOPT_S, COMPUTE_S, FORM_S, MOVE_S, Ranks, Rest
from meshrl.common.api.stats import RankStats
from meshrl.common.base.errors import Damaged, Fenced, Refused
from meshrl.common.base.files.below import below
from meshrl.common.base.host.interfaces import address_of
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.residents.places import Places
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.ways.meeting import meetings_of, spans_hosts
from meshrl.services.trainer.arithmetic.memory import LearnerMemory, taken_again
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.compute.gradient_transfer import collect, read
from meshrl.services.trainer.ranks import interfaces
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.saving import RankRestoring, RankSaving, RankStaging
from meshrl.services.trainer.ranks.thread import RankThread

Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic
# Of what all ranks have kept together.
SAME = ("job", "lineage", "version", "manifest", "ranks", "counts")


class RankRows:
    """The rows of one rank, which sleep step by step as rank 0 orders, so that all ranks go or
    none; `tier` is where they are.
    """

    def __init__(self, rank: Rank, run: Run, places: Places, where: str) -> None:
        self._rank, self._run, self.places, self._where = rank, run, places, where
        self.tier = Tier.ACCELERATOR
        self._memory: LearnerMemory | None = None
        self._copy = Tier.ACCELERATOR  # where a copy is kept; accelerator: nowhere

    @property
    def bytes(self) -> int:
        awake = self.tier == Tier.ACCELERATOR or self._copy == Tier.ACCELERATOR
        return self._rank.bytes if awake else 0

    @property
    def copied(self) -> bool:
        return self._copy != Tier.ACCELERATOR

    async def obey(self, order: Rest) -> None:
        """Does what is ordered; once more changes nothing."""
        tier = Tier(order.tier)
        if order.what == "keep":
            self._memory = await self._work(partial(self._rank.memory, gradients=True))
            await self.places.keep(tier, order.about, self._memory.kept)
            self._copy = tier
        elif order.what == "release" and self._memory is not None:
            await self._work(self._memory.give_back)
            self.tier = self._copy
        elif order.what == "take" and self._memory is not None and self._copy != Tier.ACCELERATOR:
            await self._take(self._memory)
        elif order.what == "move" and tier == Tier.ABSENT:
            await self.places.forget()
            self.tier = tier  # its worker may end it from here on
        elif order.what == "move" and tier == Tier.ACCELERATOR:
            self.tier = self._copy  # it is needed all the same; what slept was given up
        elif order.what == "move" and self._copy not in (tier, Tier.ACCELERATOR):
            await self.places.move(self._copy, tier)
            self._copy = self.tier = tier
        elif order.what == "resume":
            await self._resume(order.about)
        elif order.what in ("discard", "forget"):
            self._copy, self._memory = Tier.ACCELERATOR, None
            await self.places.forget()

    def left_group(self) -> None:
        """Its rows are made anew; what is kept stays, for `resume`."""
        self.tier = self._copy = Tier.ACCELERATOR
        self._memory = None

    def sleeps_without(self, tier: Tier) -> None:
        """It is at this tier, and has nothing there."""
        self.tier = self._copy = tier

    async def _take(self, memory: LearnerMemory) -> None:
        await taken_again(memory, self._work, self._where)
        try:
            await self.places.take(self._copy, memory.kept)
        except Damaged:
            raise
        except BaseException:
            await self._work(memory.give_back)
            raise
        await self._work(memory.filled)
        self.tier = Tier.ACCELERATOR

    async def _resume(self, about: dict[str, Any]) -> None:
        found = await self.places.found()
        if found is None:
            raise Refused("nothing whole is kept here", where=self._where)
        tier, head = found
        if any(head.about.get(key) != about[key] for key in SAME):
            raise Refused("what is kept here is of another step", where=self._where)
        memory = await self._work(partial(self._rank.memory, gradients=False))
        await self.places.take(tier, memory.kept)
        await self._work(partial(self._rank.learner.go_on, about["counts"]))

    async def _work(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self._run(work, *args, deadline_s=MOVE_S)


ORDERED_S = 600.0  # for rank 0 to bring all ranks to a tier
LOOK_S = 0.05  # how often it is seen whether it has
FORGOTTEN_S = 10.0  # for rank 0 to say, after that, that what was kept may go


class RankActor(Actor):
    """Obeys the newest core: an order of an earlier generation is refused."""

    interface = Ranks

    def __init__(self, mesh: Mesh, data: JobData, seat: Seat, rank: Rank) -> None:
        group_s = data.config.training.rank_deadline_s
        self._mesh, self._seat, self._rank = mesh, seat, rank
        self._generation = 0
        # Where rank 0 is on this host, all that it names lies there.
        self._meetings = meetings_of(mesh.settings)
        self._thread = RankThread(mesh, group_s)
        self._bulk = BulkClient(mesh)
        about = mesh, self._bulk, data, rank, self._thread.run
        self._saving, self._restoring = RankSaving(*about), RankRestoring(*about)
        self._staging = RankStaging(*about)
        self._drained = asyncio.Event()
        self._epoch = 0  # of the last wish
        places = Places(mesh, *mesh.settings.places)
        self._rows = RankRows(rank, self._thread.run, places, mesh.name)

    def published(self) -> dict[str, Any]:
        late = self._rank.late
        stats = RankStats(
            paced=late.get("paced"),
            late=late.get("late"),
            group=self._generation,
            epoch=self._epoch,
            tier=str(self._rows.tier),
        )
        return self._seat.stats() | stats.encoded()

    @call(Ranks.drain)
    def drain(self, request: str) -> None:
        """The core repeats the step on the gang that comes next."""
        self._drained.set()

    @call(Ranks.settle)
    async def settle(self, wish: Settle) -> Settled:
        """Answers when its rows are at the tier, to which rank 0 brings those of all ranks; absent
        once rank 0 has gathered them. A rank of no group has none: one that has begun anew while
        its gang sleeps is asleep with it, until rank 0 forms the gang again.
        """
        if wish.epoch < self._epoch:
            raise Fenced(
                f"a wish of epoch {wish.epoch}; the last one is of {self._epoch}",
                where=self._mesh.name,
                fix="read the record again",
            )
        self._epoch = wish.epoch
        places = self._rows.places
        places.told(wish.segments, wish.files)
        async with self._mesh.clock.timeout(ORDERED_S, "an order of rank 0"):
            while self._rows.tier != wish.tier and self._epoch == wish.epoch:
                if wish.tier != Tier.ACCELERATOR and not self._generation:
                    self._rows.sleeps_without(Tier(wish.tier))
                    break
                await self._mesh.clock.sleep(LOOK_S)
        if wish.tier == Tier.ACCELERATOR:
            # Until rank 0 has had what it kept forgotten, when all ranks have theirs again; if that
            # does not come, it is told as held.
            until = self._mesh.clock.monotonic() + FORGOTTEN_S
            while self._rows.copied and self._mesh.clock.monotonic() < until:
                await self._mesh.clock.sleep(LOOK_S)
        held = places.held
        return Settled(self._rows.bytes, held[Tier.MEMORY], held[Tier.DISK])

    @call(Ranks.rest)
    async def rest(self, order: orders.Rest) -> None:
        self._check(order.generation)
        await self._rows.obey(order)

    async def until_drained(self) -> None:
        await self._drained.wait()

    @call(Ranks.stand_by)
    async def stand_by(self, order: orders.RankOrder) -> orders.StandsBy:
        if order.generation < self._generation:
            raise self._fenced(order.generation)
        self._generation = order.generation
        self._rows.left_group()
        await self._staging.close()
        await self._restoring.close()
        await self._thread.leave(self._rank.leave)
        await self._thread.ended()
        await self._saving.clear()
        settings = self._mesh.settings
        return orders.StandsBy(settings.host, address_of(interfaces.wide(settings)))

    @call(Ranks.form)
    async def form(self, meeting: orders.Meeting) -> None:
        self._check(meeting.generation)
        wide = spans_hosts(meeting.where)
        if not wide:
            below(self._meetings, meeting.where, self._mesh.name)
        interface = interfaces.wide(self._mesh.settings) if wide else interfaces.LOOPBACK
        await self._thread.run(self._rank.form, meeting, interface, deadline_s=FORM_S)

    @call(Ranks.begin)
    def begin(self, order: orders.RankOrder) -> None:
        self._check(order.generation)
        self._rank.begin()

    @call(Ranks.compute)
    async def compute(self, part: orders.RoundPart) -> orders.RoundStats:
        self._check(part.generation)
        bins = [Bin.from_arrays(bin) for bin in part.bins]
        stats = await self._thread.run(self._rank.compute, part.index, bins, deadline_s=COMPUTE_S)
        return orders.RoundStats([asdict(one) for one in stats])

    @call(Ranks.keep)
    async def keep(self, lent: orders.LentGradient) -> None:
        self._check(lent.generation)
        path = below(self._meetings, lent.path, self._mesh.name) if lent.path else None
        keep, run = self._rank.keeping(cut=path is None), self._mesh.host.run_blocking
        if path is not None:
            numbers = await run(read, str(path), lent.size, deadline_s=MOVE_S)
        else:
            about = f"trainer/{self._seat.job}", lent.pieces, lent.size, lent.bulk
            numbers = await collect(self._mesh, self._bulk, *about)
        await run(keep, lent.index, numbers, deadline_s=MOVE_S)

    @call(Ranks.adopt)
    async def adopt(self, order: orders.Adopt) -> None:
        self._check(order.generation)
        settings = AlgorithmConfig(**order.algorithm), OptimizerConfig(**order.optimizer)
        await self._thread.run(self._rank.learner.adopt, *settings, deadline_s=ADOPT_S)

    @call(Ranks.apply)
    async def apply(self, update: orders.Update) -> float:
        self._check(update.generation)
        about = update.rounds, update.denominator, update.lr_factor
        norm = await self._thread.run(self._rank.apply, *about, deadline_s=COMPUTE_S)
        return norm

    @call(Ranks.score)
    async def score(self, part: orders.ScorePart) -> orders.Scores:
        self._check(part.generation)
        bin = Bin.from_arrays(part.bin)
        return orders.Scores(
            await self._thread.run(self._rank.score, bin, part.what, deadline_s=COMPUTE_S)
        )

    @call(Ranks.stage)
    async def stage(self, order: orders.StageRows) -> None:
        self._check(order.generation)
        await self._staging.stage(order)

    @call(Ranks.staged)
    async def staged(self, order: orders.RowsStaged) -> orders.StagedRows:
        self._check(order.generation)
        return await self._staging.staged(order)

    @call(Ranks.save)
    async def save(self, order: orders.SaveRows) -> orders.Trouble:
        self._check(order.generation)
        return await self._saving.save(order)

    @call(Ranks.saved)
    async def saved(self, order: orders.RowsSaved) -> orders.SavedFiles:
        self._check(order.generation)
        return await self._saving.saved(order)

    @call(Ranks.restore)
    async def restore(self, order: orders.RestoreRows) -> orders.RowsRestored:
        self._check(order.generation)
        return await self._restoring.restore(order)

    @call(Ranks.take)
    async def take(self, taking: orders.Taking) -> None:
        self._check(taking.generation)
        await self._thread.run(self._rank.learner.take, taking.names, None, deadline_s=MOVE_S)

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise self._fenced(generation)

    def _fenced(self, generation: int) -> Fenced:
        return Fenced(
            f"an order of generation {generation}; this rank is in {self._generation}",
            where=self._mesh.name,
        )
