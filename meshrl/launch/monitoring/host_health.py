"""Health of a host as a whole, from its root process and from periodic reads of Redis.

The event loop writes it, the endpoint's threads read it.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.telemetry.watchdog import Watchdog
from meshrl.common.state import registry
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.redis.client import StateClient
from meshrl.launch.root_process import RootProcess
from meshrl.view.metrics.mesh_gauges import HeadSnapshot

POLL_S = 5.0  # between two polls: each reads the whole registry, which may have thousands of rows
UNREADY_POLL_S = 1.0  # while the host is not as it should be
REDIS_TIMEOUT_S = 4.0
MAX_AGE_S = 30.0  # an older snapshot of the mesh counts as outdated

ReadHead = Callable[[StateClient], Awaitable[HeadSnapshot]]


@dataclass(frozen=True)
class MonitoredProcess:
    """Process that runs on this host, or that should."""

    service: str
    kind: str
    job: str = ""
    metrics_address: str = ""  # where it serves its page; empty: nowhere
    is_alive: bool = True  # it renews its lease

    @property
    def labels(self) -> dict[str, str]:
        return {"service": self.service, "kind": self.kind, "job": self.job}


@dataclass(frozen=True)
class HostSnapshot:
    entries: tuple[registry.RegistryEntry, ...] = ()  # of this host, those with a lease
    drain_reason: str = ""  # why nothing new is placed here; empty: something may be
    head: HeadSnapshot | None = None
    taken_at_s: float = 0.0


class HostHealth:
    """Liveness and readiness of the host, and its processes."""

    def __init__(
        self,
        root: RootProcess,
        stop: asyncio.Event,
        read_head: ReadHead | None,
        stall_s: float,
        poll_s: float,
    ) -> None:
        """`stop` is set once the host is to end. `read_head` reads the mesh, at its head."""
        self._root, self._stop, self._read_head = root, stop, read_head
        self._clock: Clock = root.clock
        self.watchdog = Watchdog(root.clock, stall_s)
        self._poll_s = poll_s
        self.snapshot = HostSnapshot()
        self.redis_silence_reason = (
            "Redis has not been polled yet"  # why Redis is not known to answer
        )
        self._unready_reason = ""
        self._planned_services: tuple[str, ...] = ()
        self._is_ready = False

    async def watch_root_process(self) -> None:
        """Record how the root process runs. Never returns."""
        while True:
            self._is_ready = self._root.is_ready
            self._unready_reason = self._root.unready_reason if self._is_ready else ""
            self._planned_services = tuple(self._root.planned_services)
            await self.watchdog.next_tick()

    async def poll_forever(self) -> None:
        """Poll Redis for the state of this host. Never returns."""
        while True:
            if (connection := self._root.connection) is not None:
                await self._poll(*connection)
            await self._clock.sleep(UNREADY_POLL_S if self.explain_not_ready() else self._poll_s)

    async def _poll(self, state: StateClient, settings: MeshSettings) -> None:
        try:
            async with self._clock.timeout(REDIS_TIMEOUT_S, "reading this host's processes"):
                found = await registry.list_entries(state)
                draining = (await pool.read_drain_reasons(state)).get(settings.host, "")
                mesh = await self._read_head(state) if self._read_head is not None else None
        except (StateUnavailable, DeadlineExceeded) as error:
            self.redis_silence_reason = f"Redis does not answer: {error.message}"
        except MeshError as error:  # Redis rejects this host, or takes no writes
            self.redis_silence_reason = f"Redis rejects this host: {error.message}"
        except Exception as error:  # of a bad row, or of Redis itself: the next poll may succeed
            if self.redis_silence_reason != (why := f"the data in Redis is unreadable: {error!r}"):
                traceback.print_exc()
            self.redis_silence_reason = why
        else:
            here = tuple(e for e in found if e.host == settings.host and e.alive)
            self.snapshot = HostSnapshot(here, draining, mesh, self._clock.monotonic())
            self.redis_silence_reason = ""

    # -- for threads -------------------------------------------------------------------------------

    def explain_not_live(self) -> str:
        """Return why the root process should be restarted; empty if it should not."""
        return self.watchdog.explain_stall()

    def explain_not_ready(self) -> str:
        """Return why the host is not ready; empty if it is."""
        if why := self.explain_not_live():
            return why
        if self._stop.is_set():
            return "the host is stopping"
        if self._root.failed.is_set():
            return f"the host has failed: {self._root.failure_reason}"
        if not self._is_ready:
            return "the host is starting"
        if why := self._unready_reason or self.redis_silence_reason:
            return why
        if (age_s := self._snapshot_age_s()) > MAX_AGE_S:
            return f"Redis has not been polled for {age_s:.0f} s"
        if self.snapshot.drain_reason:
            return f"the host is draining: {self.snapshot.drain_reason}"
        silent = [p.service for p in self.list_processes() if not p.is_alive]
        return f"{', '.join(silent)} does not renew its lease" if silent else ""

    def list_processes(self) -> list[MonitoredProcess]:
        """Return this host's processes with leases, and services that should run and do not."""
        alive = [
            MonitoredProcess(e.name, e.kind, str(e.stats.get("job") or ""), e.metrics)
            for e in self.snapshot.entries
        ]
        names = {process.service for process in alive}
        return alive + [
            MonitoredProcess(name, name.partition("/")[0], is_alive=False)
            for name in self._planned_services
            if name not in names
        ]

    def find_head_snapshot(self) -> HeadSnapshot | None:
        """Return the mesh as read within the last seconds; None: it is not known."""
        return (
            None
            if self.redis_silence_reason or self._snapshot_age_s() > MAX_AGE_S
            else self.snapshot.head
        )

    def _snapshot_age_s(self) -> float:
        return self._clock.monotonic() - self.snapshot.taken_at_s
