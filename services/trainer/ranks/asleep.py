"""How a rank's rows sleep: step by step as rank 0 orders, so that all ranks go or none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from meshrl.common.api.ranks import MOVE_S, Rest
from meshrl.common.base.errors import Damaged, Refused
from meshrl.common.mesh.residents.places import Places
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.trainer.arithmetic.memory import LearnerMemory, taken_again
from meshrl.services.trainer.ranks.rank import Rank

Run = Callable[..., Awaitable[Any]]  # runs what blocks, on the thread of the rank's arithmetic
# Of what all ranks have kept together.
SAME = ("job", "lineage", "version", "manifest", "ranks", "counts")


class RankRows:
    """The rows of one rank; `tier` is where they are."""

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
