"""Lease on a process's name in the registry: acquired, renewed from a thread, and released.

Each renewal carries the process's counters and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, Fenced, Refused, StateUnavailable
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.mesh.telemetry.watchdog import Watchdog, dump_stacks
from meshrl.common.state import registry

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host, Stoppable
    from meshrl.common.mesh.runtime.dependencies import LeaseTerms
    from meshrl.common.mesh.runtime.process_credentials import ProcessCredentials
    from meshrl.common.state.redis.client import StateClient

# Exit status of a process that may no longer act under its name (EX_TEMPFAIL: restart it).
LEASE_LOST_EXIT_STATUS = 75
RETRY_S = 0.25
REPORTED_STALL_S = 1.0  # seconds without a tick of the event loop that are published
RELEASE_TIMEOUT_S = 2.0  # it expires by itself if Redis does not answer


class Lease:
    """Lease of one process.

    The loop takes snapshots of its stats with each tick, and a thread sends the last one.
    """

    def __init__(
        self,
        state: StateClient,
        host: Host,
        clock: Clock,
        terms: LeaseTerms,
        watchdog: Watchdog,
        telemetry: Telemetry,
        snapshot: Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]],
        credentials: ProcessCredentials | None = None,
    ) -> None:
        """Create a lease. With `credentials` each renewal registers this process's key and reads
        revocations.
        """
        self._credentials = credentials
        self._state, self._host, self._clock = state, host, clock
        self._watchdog, self._telemetry = watchdog, telemetry
        self._ttl_s, self._renew_s, self._on_lost = (
            terms.ttl_s,
            terms.renew_interval_s,
            terms.on_lost,
        )
        self._snapshot = snapshot
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._renewal: Stoppable | None = None
        self._published_state: Any = None
        self._is_held = False
        self._renewed_at = clock.monotonic()
        self.entry = registry.RegistryEntry("", "")
        self.token = 0

    async def acquire(self, entry: registry.RegistryEntry) -> int:
        """Acquire the name and return the fencing token.

        Waits for a predecessor's lease to expire, for at most two lease lengths. While the lease is
        held, only the entry is replaced.
        """
        self._loop = asyncio.get_running_loop()
        self.entry = entry
        entry.stats, entry.waits = self._snapshot()
        until = self._clock.monotonic() + 2 * self._ttl_s
        while True:
            try:
                self.token = await registry.register(self._state, entry, int(self._ttl_s * 1000))
                break
            except Refused:
                if self._clock.monotonic() > until:
                    raise
                await self._clock.sleep(RETRY_S)
        if self._is_held:
            return self.token
        self._is_held, self._renewed_at = True, self._clock.monotonic()
        self._ticker = asyncio.create_task(self._tick(), name="watchdog")
        self._renewal = self._host.run_periodically(
            self._renew_s, self.renew, f"lease {entry.name}"
        )
        return self.token

    async def _tick(self) -> None:
        while True:
            await self._watchdog.next_tick()
            self.entry.stats, self.entry.waits = self._snapshot()
            state = (self.entry.stats.get("ready"), self.entry.stats.get("epoch"))
            if state != self._published_state:  # other processes wait for these fields
                self._published_state = state
                await self.publish()

    async def publish(self) -> None:
        """Publish the current stats and waits."""
        self.entry.stats, self.entry.waits = self._snapshot()
        try:
            await self._host.run_blocking(self.renew, deadline_s=self._ttl_s)
        except DeadlineExceeded:
            self._telemetry.count("renewals_failed")

    def explain_lapse(self) -> str:
        """Explain why this process cannot rely on its name; empty while the lease is valid."""
        if not self._is_held:
            return "it has no lease"
        silent_s = self._clock.monotonic() - self._renewed_at
        return f"its lease was renewed {silent_s:.1f} s ago" if silent_s > self._ttl_s else ""

    async def renew_now(self) -> bool:
        """Renew now and return True if the lease is held. Exits the process if it is lost."""
        if self._is_held:
            await self.publish()
        return self._is_held

    def renew(self) -> bool:
        """Renew once; False ends the thread. Runs off the loop."""
        if not self._is_held:
            return False
        hung = self._watchdog.explain_stall()
        if hung:
            return self._handle_loss(hung)
        entry, requested_at = self.entry, self._clock.monotonic()
        stats = entry.stats
        if (
            still_s := self._watchdog.stalled_for_s
        ) > REPORTED_STALL_S:  # a blocked loop has no tick to report this
            stats = stats | {"loop_lag_ms": round(still_s * 1000, 1)}
        doorway, ttl_ms = self._credentials, int(self._ttl_s * 1000)
        row = doorway.row if doorway is not None else None
        try:
            renewal = registry.renew_lease(
                self._state, entry.name, self.token, ttl_ms, stats, entry.waits, row
            )
        except StateUnavailable:
            self._telemetry.count("renewals_failed")
            return True  # the lease may outlive the outage: retry
        if renewal.is_renewed or not self._is_held:
            self._renewed_at = requested_at
            if doorway is not None and renewal.is_renewed:
                doorway.keys.refresh_keys(renewal.revocations)
            return True
        why = "the lease has expired, or another incarnation has taken the name"
        return self._handle_loss(renewal.loss_reason or why)

    def _handle_loss(self, why: str) -> bool:
        self._is_held = False
        text = f"{self.entry.name} ({self.entry.incarnation}) lost its lease: {why}"
        if self._on_lost is not None:
            self._on_lost(text)
        else:
            dump_stacks(text, self._loop)
            self._host.exit(LEASE_LOST_EXIT_STATUS, text, Fenced(text))
        return False

    async def release(self) -> None:
        """Stop renewing and release the name; if Redis does not answer, the lease expires."""
        if self._renewal is not None:
            self._renewal.stop()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._is_held:
            self._is_held = False
            try:
                async with self._clock.timeout(RELEASE_TIMEOUT_S, "the release of the name"):
                    await registry.release_lease(self._state, self.entry.name, self.token)
            except (StateUnavailable, DeadlineExceeded):
                self._telemetry.count("releases_failed")
