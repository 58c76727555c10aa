"""Tier control of a role process: its worker requests a tier, and one change runs at a time.

A change that has begun completes even if its requester has exited. A repeated request finds the
change in progress or complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, Fenced, Refused
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.state.pool.workers.rows import Tier

EMPTY_EXIT_STATUS = 70  # exit status of a needed process that has lost its state


class Sleeper(Protocol):
    """Part of a role process that sleeps and wakes."""

    async def sleep(self, tier: Tier) -> None:
        """Stop at a safe point, and move all kinds to `tier`, or drop those that can be rebuilt.

        From the safe point on `KindController.is_asleep` is True. If it raises, the process stays
        as before.
        """

    async def wake(self) -> None:
        """Load all kinds and continue.

        It stays asleep if it raises Refused or StorageFull. CorruptData means that the saved state
        is lost and that it continues without that state.
        """

    async def move(self, tier: Tier) -> None:
        """Move the offloaded state to another tier, and that of other processes. Idempotent."""

    @property
    def is_removable(self) -> bool:
        """True if another process can find all state that must be retained."""

    async def prepare_removal(self) -> None:
        """Stop for good and store all state that must be retained where another process finds it.

        The process is awake, or `is_removable`. If this raises, the process is as before.
        """

    async def cancel_removal(self) -> None:
        """Cancel a removal: the process is awake and continues."""


class StatelessSleeper:
    """Defaults of a `Sleeper` whose state is entirely available elsewhere."""

    is_removable = True

    async def move(self, tier: Tier) -> None:
        """Do nothing; see `Sleeper`."""

    async def prepare_removal(self) -> None:
        """Do nothing; see `Sleeper`."""

    async def cancel_removal(self) -> None:
        """Do nothing; see `Sleeper`."""


class SleepTimer:
    """Timer of total sleep, so that sleep does not count as work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._previous_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start a period of sleep."""
        self._since = self._clock.monotonic()

    def stop(self) -> None:
        """End a period of sleep."""
        self._previous_s, self._since = self.total_s, None

    @property
    def total_s(self) -> float:
        """Seconds of all sleep, including a period in progress."""
        lasts = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return self._previous_s + lasts


class TierController:
    """Tier of a process, and the desired state that set it."""

    def __init__(
        self,
        mesh: Mesh,
        sleeper: Sleeper,
        kinds: KindController,
        set_time_slicing: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """Create a controller. `set_time_slicing` is called with whether the awake process takes
        time slices.
        """
        self._mesh, self._sleeper, self._set_time_slicing = mesh, sleeper, set_time_slicing
        self._kinds = kinds
        self.tier = Tier.ACCELERATOR
        self.epoch = 0  # of the last desired state
        self._durations_s: dict[str, float] = {}  # last duration of each: sleep_s, wake_s
        self._desired: SetTier | None = None
        self._transition: asyncio.Task[None] | None = None

    @property
    def tier_usage(self) -> TierUsage:
        """Bytes on each tier now."""
        stored_bytes = self._kinds.stored_bytes
        return TierUsage(
            self._kinds.accelerator_bytes, stored_bytes[Tier.MEMORY], stored_bytes[Tier.DISK]
        )

    def stats(self) -> dict[str, Any]:
        """Return the statistics that a process publishes about its tier."""
        return {"epoch": self.epoch, "tier": str(self.tier), **self._durations_s}

    async def set_tier(self, desired: SetTier) -> TierUsage:
        """Handle a SetTier request."""
        tier = Tier(desired.tier) if desired.tier in list(Tier) else None
        if tier is None:
            raise Refused(f"there is no tier '{desired.tier}'", where=self._mesh.name)
        other = self._desired is not None and desired.tier != self._desired.tier
        if desired.epoch < self.epoch or (desired.epoch == self.epoch and other):
            raise Fenced(
                f"the request for tier '{tier}' has epoch {desired.epoch}; the latest epoch is "
                f"{self.epoch}",
                where=self._mesh.name,
                fix="Read the record again",
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
        """Cancel the change in progress: the process exits."""
        await self._kinds.stop()
        if self._transition is not None:
            self._transition.cancel()
            await asyncio.gather(self._transition, return_exceptions=True)

    async def _transition_after(
        self, earlier: asyncio.Task[None] | None, desired: SetTier, tier: Tier
    ) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        if desired.epoch != self.epoch:
            raise Fenced(
                f"a request of epoch {self.epoch} replaced this one", where=self._mesh.name
            )
        self._kinds.set_targets(desired.segment_owner, desired.offload_dir)
        if self._set_time_slicing is not None:
            await self._set_time_slicing(desired.time_sliced)
        if tier != self.tier:
            was = self.tier
            await self._transition_to(tier)
            self._mesh.telemetry.log.info("tier", was=was, now=self.tier, epoch=desired.epoch)

    async def _transition_to(self, tier: Tier) -> None:
        # the desired state changed before the worker ended the process
        if self.tier == Tier.ABSENT:
            if not self._kinds.accelerator_bytes:
                self._mesh.host.exit(
                    EMPTY_EXIT_STATUS, "it has dropped all its state, so it restarts"
                )
            await self._sleeper.cancel_removal()
            self.tier = Tier.ACCELERATOR
        if tier == self.tier:
            return
        if tier == Tier.ABSENT:
            if self.tier != Tier.ACCELERATOR and not self._sleeper.is_removable:
                await self._wake()
            await self._sleeper.prepare_removal()
            await self._drop_copies(even_if_offloaded=True)
        elif tier == Tier.ACCELERATOR:
            await self._wake()
        elif self.tier == Tier.ACCELERATOR:
            await self._sleep(tier)
        else:
            await self._sleeper.move(tier)
        self.tier = tier

    async def _sleep(self, tier: Tier) -> None:
        began = self._mesh.clock.monotonic()
        try:
            await self._sleeper.sleep(tier)
        except BaseException:
            self._kinds.is_asleep = False
            raise
        self._durations_s["sleep_s"] = round(self._mesh.clock.monotonic() - began, 3)

    async def _wake(self) -> None:
        began = self._mesh.clock.monotonic()
        try:
            await self._sleeper.wake()
            self._durations_s["wake_s"] = round(self._mesh.clock.monotonic() - began, 3)
        except CorruptData:
            # and continues from another source
            self.tier, self._kinds.is_asleep = Tier.ACCELERATOR, False
            raise
        # even if the next statement fails
        self.tier, self._kinds.is_asleep = Tier.ACCELERATOR, False
        await self._drop_copies()

    async def _drop_copies(self, *, even_if_offloaded: bool = False) -> None:
        """Delete the copies; see `KindController.drop_copies`.

        A file that cannot be removed is useless and does not change the
        tier.
        """
        try:
            await self._kinds.drop_copies(even_if_offloaded=even_if_offloaded)
        except OSError as error:
            self._mesh.telemetry.log.warning("offloaded state cannot be removed", error=str(error))
