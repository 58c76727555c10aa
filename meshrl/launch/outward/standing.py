"""How a host stands as a whole: what its root process knows by itself, and what it reads of Redis
now and then. Written on the event loop, read by the endpoint's threads.
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
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.redis.client import State
from meshrl.launch.root import RootProcess
from meshrl.view.metrics.mesh_gauges import HeadSnapshot

LOOK_S = 5.0  # between two looks: each reads the whole registry, which may have thousands of rows
SOON_S = 1.0  # while the host is not as it should be
ANSWER_S = 4.0
OLD_S = 30.0  # what was seen of the mesh is true no more once it is older

OfMesh = Callable[[State], Awaitable[HeadSnapshot]]


@dataclass(frozen=True)
class MonitoredProcess:
    """One that runs on this host, or that should."""

    service: str
    kind: str
    job: str = ""
    metrics: str = ""  # where it serves its page; empty: nowhere
    alive: bool = True  # it renews its lease

    @property
    def labels(self) -> dict[str, str]:
        return {"service": self.service, "kind": self.kind, "job": self.job}


@dataclass(frozen=True)
class Seen:
    entries: tuple[registry.Entry, ...] = ()  # of this host, those with a lease
    draining: str = ""  # why nothing new is placed here; empty: something may be
    mesh: HeadSnapshot | None = None
    at_s: float = 0.0


class Standing:
    """Whether the host lives and is ready, and which processes it has."""

    def __init__(
        self,
        root: RootProcess,
        stop: asyncio.Event,
        of_mesh: OfMesh | None,
        stall_s: float,
        look_s: float,
    ) -> None:
        """`stop` is set once the host is to end. `of_mesh` looks at the mesh, at its head."""
        self._root, self._stop, self._of_mesh = root, stop, of_mesh
        self._clock: Clock = root.clock
        self.watchdog = Watchdog(root.clock, stall_s)
        self._look_s = look_s
        self.seen = Seen()
        self.silent = "nobody has asked Redis yet"  # why Redis is not known to answer
        self._hindered = ""
        self._planned: tuple[str, ...] = ()
        self._ready = False

    async def tick(self) -> None:
        """Notes how the root process runs. Never returns."""
        while True:
            self._ready = self._root.ready
            self._hindered = self._root.hindered if self._ready else ""
            self._planned = tuple(self._root.planned)
            await self.watchdog.next_tick()

    async def look(self) -> None:
        """Reads what Redis tells of this host, again and again. Never returns."""
        while True:
            if (reached := self._root.reached) is not None:
                await self._look(*reached)
            await self._clock.sleep(SOON_S if self.not_ready() else self._look_s)

    async def _look(self, state: State, settings: MeshSettings) -> None:
        try:
            async with self._clock.timeout(ANSWER_S, "looking at this host's processes"):
                found = await registry.entries(state)
                draining = (await pool.draining(state)).get(settings.host, "")
                mesh = await self._of_mesh(state) if self._of_mesh is not None else None
        except (StateUnavailable, DeadlineExceeded) as error:
            self.silent = f"Redis does not answer: {error.message}"
        except MeshError as error:  # it lets this host in no more, or takes no writes
            self.silent = f"Redis refuses: {error.message}"
        except Exception as error:  # of a bad row, or of Redis itself: the next look may be whole
            if self.silent != (why := f"what Redis holds cannot be read: {error!r}"):
                traceback.print_exc()
            self.silent = why
        else:
            here = tuple(e for e in found if e.host == settings.host and e.alive)
            self.seen = Seen(here, draining, mesh, self._clock.monotonic())
            self.silent = ""

    # -- for threads -------------------------------------------------------------------------------

    def not_live(self) -> str:
        """Why the root process should be started again; empty if it should not."""
        return self.watchdog.stalled()

    def not_ready(self) -> str:
        """Why nobody should count on this host now; empty if it is ready."""
        if why := self.not_live():
            return why
        if self._stop.is_set():
            return "it is ending"
        if self._root.failed.is_set():
            return f"it has given up: {self._root.why}"
        if not self._ready:
            return "it is starting"
        if why := self._hindered or self.silent:
            return why
        if (age_s := self._age_s()) > OLD_S:
            return f"nobody has asked Redis for {age_s:.0f} s"
        if self.seen.draining:
            return f"it is draining: {self.seen.draining}"
        silent = [p.service for p in self.processes() if not p.alive]
        return f"{', '.join(silent)} renews no lease" if silent else ""

    def processes(self) -> list[MonitoredProcess]:
        """Those of this host that live by their leases, and services that should and do not."""
        alive = [
            MonitoredProcess(e.name, e.kind, str(e.stats.get("job") or ""), e.metrics)
            for e in self.seen.entries
        ]
        names = {process.service for process in alive}
        return alive + [
            MonitoredProcess(name, name.partition("/")[0], alive=False)
            for name in self._planned
            if name not in names
        ]

    def mesh(self) -> HeadSnapshot | None:
        """The mesh as it was seen within the last seconds; None: that is not known."""
        return None if self.silent or self._age_s() > OLD_S else self.seen.mesh

    def _age_s(self) -> float:
        return self._clock.monotonic() - self.seen.at_s
