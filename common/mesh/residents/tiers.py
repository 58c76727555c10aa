"""Brings a role process from tier to tier at its worker's word, one change at a time.

Whoever asked may have gone meanwhile: a change that has begun goes on to its end, and the same wish
again finds it under way, or done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from meshrl.common.api.calls.role import Settle, Settled
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Damaged, Fenced, Refused
from meshrl.common.base.files.kept import Content, Resumable
from meshrl.common.mesh.residents.places import Places
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.state.pool.workers.rows import Tier

# Keeps a copy of what a process has; what it raises says that nothing is kept.
Keep = Callable[[Mapping[str, Any], Content], Awaitable[None]]
# Puts it back; Damaged when it is not what was kept.
Take = Callable[[Resumable], Awaitable[None]]


GIVEN_UP = 70  # exit status of a process that is wanted again, and has nothing any more


class Sleeper(Protocol):
    """What of a role process sleeps and wakes."""

    @property
    def bytes(self) -> int:
        """That its tensors take on the accelerator now."""

    async def sleep(self, keep: Keep) -> None:
        """Comes to rest at a safe point, has all that it cannot get again kept, and frees its
        memory. When `keep` raises it is as before, and so is what it raises.
        """

    async def wake(self, take: Take) -> None:
        """Takes its memory again, and what was kept, and goes on. It sleeps on if it raises Refused
        or StorageFull; Damaged means that what was kept is lost, and that it goes on without.
        """

    async def move(self, tier: Tier) -> None:
        """What other processes keep that sleep with it goes to another tier; once more changes
        nothing. Its own is the caller's.
        """

    @property
    def covered(self) -> bool:
        """Whether all that is to stay lies where another process finds it."""

    async def cover(self) -> None:
        """Comes to rest for good, with all that is to stay where another process finds it: there is
        need of this one any more. It is awake, or `covered`. As before when it raises.
        """

    async def uncover(self) -> None:
        """It is needed all the same, and is awake: it goes on."""


class KeepsNothing:
    """The part of a `Sleeper` that has nothing but what another process finds elsewhere."""

    covered = True

    async def move(self, tier: Tier) -> None:
        """See `Sleeper`."""

    async def cover(self) -> None:
        """See `Sleeper`."""

    async def uncover(self) -> None:
        """See `Sleeper`."""


class Nap:
    """How long something has slept so far, so that it is not taken for work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before_s = 0.0
        self._since: float | None = None

    def began(self) -> None:
        """It sleeps."""
        self._since = self._clock.monotonic()

    def ended(self) -> None:
        """It is awake."""
        self._before_s, self._since = self.total_s, None

    @property
    def total_s(self) -> float:
        """All naps together, the one that lasts among them."""
        lasts = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return self._before_s + lasts


class Tiers:
    """The tier of a process, and the wish that brought it there."""

    def __init__(
        self,
        mesh: Mesh,
        sleeper: Sleeper,
        segments: str = "",
        files: str = "",
        turns: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """`turns` is told whether turns are taken while it is awake."""
        self._mesh, self._sleeper, self._turns = mesh, sleeper, turns
        self.places = Places(mesh, segments, files)
        self.tier = self.heading = Tier.ACCELERATOR  # where it is, and where it goes to sleep
        self.epoch = 0  # of the last wish
        self._took: dict[str, float] = {}  # seconds of the last of each: sleep_s, wake_s
        self._wish: Settle | None = None
        self._moving: asyncio.Task[None] | None = None

    @property
    def held(self) -> Settled:
        """Bytes of each now."""
        kept = self.places.held
        return Settled(self._sleeper.bytes, kept[Tier.MEMORY], kept[Tier.DISK])

    def stats(self) -> dict[str, Any]:
        """What a process publishes of it."""
        return {"epoch": self.epoch, "tier": str(self.tier), **self._took}

    async def settle(self, wish: Settle) -> Settled:
        """Answers Settle."""
        tier = Tier(wish.tier) if wish.tier in list(Tier) else None
        if tier is None:
            raise Refused(f"there is no tier '{wish.tier}'", where=self._mesh.name)
        other = self._wish is not None and wish.tier != self._wish.tier
        if wish.epoch < self.epoch or (wish.epoch == self.epoch and other):
            raise Fenced(
                f"a wish of epoch {wish.epoch} for '{tier}'; the last one is of {self.epoch}",
                where=self._mesh.name,
                fix="read the record again",
            )
        running = self._moving
        if wish.epoch > self.epoch or running is None or running.done():
            self.epoch, self._wish = wish.epoch, wish
            moving = self._after(running, wish, tier)
            self._moving = asyncio.create_task(moving, name=f"to {tier}")
            self._moving.add_done_callback(looked_at)
        assert self._moving is not None
        await asyncio.shield(self._moving)
        return self.held

    async def stop(self) -> None:
        """Ends what is under way: the process ends."""
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.gather(self._moving, return_exceptions=True)

    async def _after(self, earlier: asyncio.Task[None] | None, wish: Settle, tier: Tier) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        if wish.epoch != self.epoch:
            raise Fenced(f"a wish of epoch {self.epoch} has come", where=self._mesh.name)
        self.places.told(wish.segments, wish.files)
        if self._turns is not None:
            await self._turns(wish.turns)
        if tier != self.tier:
            was = self.tier
            await self._to(tier)
            self._mesh.telemetry.log.info("tier", was=was, now=self.tier, epoch=wish.epoch)

    async def _to(self, tier: Tier) -> None:
        if self.tier == Tier.ABSENT:  # the wish has changed before its worker has ended it
            if not self._sleeper.bytes:
                self._mesh.host.exit(GIVEN_UP, "it has given up all that it had: it starts again")
            await self._sleeper.uncover()
            self.tier = Tier.ACCELERATOR
        if tier == self.tier:
            return
        if tier == Tier.ABSENT:
            if self.tier != Tier.ACCELERATOR and not self._sleeper.covered:
                await self._wake()
            await self._sleeper.cover()
            await self._forget()
        elif tier == Tier.ACCELERATOR:
            await self._wake()
        elif self.tier == Tier.ACCELERATOR:
            await self._sleep(tier)
        else:
            await self._sleeper.move(tier)
            if self.places.held[self.tier]:
                await self.places.move(self.tier, tier)
        self.tier = tier

    async def _sleep(self, tier: Tier) -> None:
        self.heading = tier
        began = self._mesh.clock.monotonic()
        try:
            await self._sleeper.sleep(partial(self.places.keep, tier))
        except BaseException:
            await self._forget()  # it may have been kept before something else failed
            raise
        self._took["sleep_s"] = round(self._mesh.clock.monotonic() - began, 3)

    async def _wake(self) -> None:
        began = self._mesh.clock.monotonic()
        try:
            await self._sleeper.wake(partial(self.places.take, self.tier))
            self._took["wake_s"] = round(self._mesh.clock.monotonic() - began, 3)
        except Damaged:
            self.tier = Tier.ACCELERATOR  # and goes on from elsewhere
            raise
        self.tier = Tier.ACCELERATOR  # whatever comes now
        await self._forget()

    async def _forget(self) -> None:
        """What cannot be removed is of no use to anybody, and changes nothing of where it is."""
        try:
            await self.places.forget()
        except OSError as error:
            self._mesh.telemetry.log.warning("what was kept is not removed", error=str(error))
