"""Brings a role process from tier to tier at its worker's word, one change at a time.

Whoever asked may have gone meanwhile: a change that has begun goes on to its end, and the same wish
again finds it under way, or done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, Fenced, Refused
from meshrl.common.base.files.offloaded_tensors import OffloadSource, OffloadTarget
from meshrl.common.mesh.instances.offload_storage import OffloadStorage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.state.pool.workers.rows import Tier

# Keeps a copy of what a process has; what it raises says that nothing is kept.
SaveTensors = Callable[[Mapping[str, Any], OffloadSource], Awaitable[None]]
# Puts it back; Damaged when it is not what was kept.
RestoreTensors = Callable[[OffloadTarget], Awaitable[None]]


EMPTY_EXIT_STATUS = 70  # exit status of a process that is wanted again, and has nothing any more


class Sleeper(Protocol):
    """What of a role process sleeps and wakes."""

    @property
    def size_bytes(self) -> int:
        """That its tensors take on the accelerator now."""

    async def sleep(self, save: SaveTensors) -> None:
        """Comes to rest at a safe point, has all that it cannot get again kept, and frees its
        memory. When `keep` raises it is as before, and so is what it raises.
        """

    async def wake(self, restore: RestoreTensors) -> None:
        """Takes its memory again, and what was kept, and goes on. It sleeps on if it raises Refused
        or StorageFull; Damaged means that what was kept is lost, and that it goes on without.
        """

    async def move(self, tier: Tier) -> None:
        """What other processes keep that sleep with it goes to another tier; once more changes
        nothing. Its own is the caller's.
        """

    @property
    def is_removable(self) -> bool:
        """Whether all that is to stay lies where another process finds it."""

    async def prepare_removal(self) -> None:
        """Comes to rest for good, with all that is to stay where another process finds it: there is
        need of this one any more. It is awake, or `covered`. As before when it raises.
        """

    async def cancel_removal(self) -> None:
        """It is needed all the same, and is awake: it goes on."""


class StatelessSleeper:
    """The part of a `Sleeper` that has nothing but what another process finds elsewhere."""

    is_removable = True

    async def move(self, tier: Tier) -> None:
        """See `Sleeper`."""

    async def prepare_removal(self) -> None:
        """See `Sleeper`."""

    async def cancel_removal(self) -> None:
        """See `Sleeper`."""


class SleepTimer:
    """How long something has slept so far, so that it is not taken for work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._previous_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """It sleeps."""
        self._since = self._clock.monotonic()

    def stop(self) -> None:
        """It is awake."""
        self._previous_s, self._since = self.total_s, None

    @property
    def total_s(self) -> float:
        """All naps together, the one that lasts among them."""
        lasts = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return self._previous_s + lasts


class TierController:
    """The tier of a process, and the wish that brought it there."""

    def __init__(
        self,
        mesh: Mesh,
        sleeper: Sleeper,
        segment_owner: str = "",
        directory: str = "",
        set_time_slicing: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """`turns` is told whether turns are taken while it is awake."""
        self._mesh, self._sleeper, self._set_time_slicing = mesh, sleeper, set_time_slicing
        self.storage = OffloadStorage(mesh, segment_owner, directory)
        self.tier = self.sleep_tier = Tier.ACCELERATOR  # where it is, and where it goes to sleep
        self.epoch = 0  # of the last wish
        self._durations_s: dict[str, float] = {}  # seconds of the last of each: sleep_s, wake_s
        self._desired: SetTier | None = None
        self._transition: asyncio.Task[None] | None = None

    @property
    def tier_usage(self) -> TierUsage:
        """Bytes of each now."""
        kept = self.storage.stored_bytes
        return TierUsage(self._sleeper.size_bytes, kept[Tier.MEMORY], kept[Tier.DISK])

    def stats(self) -> dict[str, Any]:
        """What a process publishes of it."""
        return {"epoch": self.epoch, "tier": str(self.tier), **self._durations_s}

    async def set_tier(self, desired: SetTier) -> TierUsage:
        """Answers Settle."""
        tier = Tier(desired.tier) if desired.tier in list(Tier) else None
        if tier is None:
            raise Refused(f"there is no tier '{desired.tier}'", where=self._mesh.name)
        other = self._desired is not None and desired.tier != self._desired.tier
        if desired.epoch < self.epoch or (desired.epoch == self.epoch and other):
            raise Fenced(
                f"a wish of epoch {desired.epoch} for '{tier}'; the last one is of {self.epoch}",
                where=self._mesh.name,
                fix="read the record again",
            )
        running = self._transition
        if desired.epoch > self.epoch or running is None or running.done():
            self.epoch, self._desired = desired.epoch, desired
            moving = self._transition_after(running, desired, tier)
            self._transition = asyncio.create_task(moving, name=f"to {tier}")
            self._transition.add_done_callback(consume_exception)
        assert self._transition is not None
        await asyncio.shield(self._transition)
        return self.tier_usage

    async def stop(self) -> None:
        """Ends what is under way: the process ends."""
        if self._transition is not None:
            self._transition.cancel()
            await asyncio.gather(self._transition, return_exceptions=True)

    async def _transition_after(
        self, earlier: asyncio.Task[None] | None, desired: SetTier, tier: Tier
    ) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        if desired.epoch != self.epoch:
            raise Fenced(f"a wish of epoch {self.epoch} has come", where=self._mesh.name)
        self.storage.set_targets(desired.segment_owner, desired.offload_dir)
        if self._set_time_slicing is not None:
            await self._set_time_slicing(desired.time_sliced)
        if tier != self.tier:
            was = self.tier
            await self._transition_to(tier)
            self._mesh.telemetry.log.info("tier", was=was, now=self.tier, epoch=desired.epoch)

    async def _transition_to(self, tier: Tier) -> None:
        if self.tier == Tier.ABSENT:  # the wish has changed before its worker has ended it
            if not self._sleeper.size_bytes:
                self._mesh.host.exit(
                    EMPTY_EXIT_STATUS, "it has given up all that it had: it starts again"
                )
            await self._sleeper.cancel_removal()
            self.tier = Tier.ACCELERATOR
        if tier == self.tier:
            return
        if tier == Tier.ABSENT:
            if self.tier != Tier.ACCELERATOR and not self._sleeper.is_removable:
                await self._wake()
            await self._sleeper.prepare_removal()
            await self._drop_stored()
        elif tier == Tier.ACCELERATOR:
            await self._wake()
        elif self.tier == Tier.ACCELERATOR:
            await self._sleep(tier)
        else:
            await self._sleeper.move(tier)
            if self.storage.stored_bytes[self.tier]:
                await self.storage.move(self.tier, tier)
        self.tier = tier

    async def _sleep(self, tier: Tier) -> None:
        self.sleep_tier = tier
        began = self._mesh.clock.monotonic()
        try:
            await self._sleeper.sleep(partial(self.storage.save, tier))
        except BaseException:
            await self._drop_stored()  # it may have been kept before something else failed
            raise
        self._durations_s["sleep_s"] = round(self._mesh.clock.monotonic() - began, 3)

    async def _wake(self) -> None:
        began = self._mesh.clock.monotonic()
        try:
            await self._sleeper.wake(partial(self.storage.restore, self.tier))
            self._durations_s["wake_s"] = round(self._mesh.clock.monotonic() - began, 3)
        except CorruptData:
            self.tier = Tier.ACCELERATOR  # and goes on from elsewhere
            raise
        self.tier = Tier.ACCELERATOR  # whatever comes now
        await self._drop_stored()

    async def _drop_stored(self) -> None:
        """What cannot be removed is of no use to anybody, and changes nothing of where it is."""
        try:
            await self.storage.drop_all()
        except OSError as error:
            self._mesh.telemetry.log.warning("what was kept is not removed", error=str(error))
