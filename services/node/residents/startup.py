"""Progress of a role process from its start until it is ready. A warm start or a replay may take
hours, and publishes how far it is as `progress` among its stats.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from meshrl.common.base.errors import NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs, registry
from meshrl.services.node.residents.roles import RoleWish

LOADING_S = 300.0  # a started process may be so long on one thing until it is ready
PAUSED_LOOK_S = 15.0  # between two looks whether its job is paused, while it starts


class Progress(Enum):
    READY = auto()
    STARTING = auto()
    LATE = auto()  # it has got no further for `LOADING_S`


class Startup:
    """Watch over one role process until its registry entry says that it is ready."""

    def __init__(self, mesh: Mesh, wish: RoleWish) -> None:
        self._mesh, self._wish = mesh, wish
        self._progress: Any = None  # what the process has published of it
        self._moved = 0.0  # when it last changed
        self._paused_looked = mesh.clock.monotonic()

    def begin(self) -> None:
        """Count the time without progress from now on."""
        self._progress, self._moved = None, self._mesh.clock.monotonic()

    async def look(self, pid: int) -> Progress:
        """Return the state of the process with this pid. One whose job is paused is never late."""
        entry = await registry.lookup(self._mesh.state, self._wish.name)
        now = self._mesh.clock.monotonic()
        stats: dict[str, Any] = {}
        here = True, self._mesh.settings.host, pid
        if entry is not None and (entry.alive, entry.host, entry.pid) == here:
            stats = entry.stats
        generation = self._wish.resident.generation
        if stats.get("generation") == generation and stats.get("ready") is True:
            return Progress.READY
        if stats.get("progress") not in (None, self._progress):
            self._progress, self._moved = stats["progress"], now
        elif now - self._paused_looked > PAUSED_LOOK_S and await self._job_is_paused():
            self._moved = now
        elif now - self._moved > LOADING_S:
            return Progress.LATE
        return Progress.STARTING

    async def _job_is_paused(self) -> bool:
        self._paused_looked = self._mesh.clock.monotonic()
        try:
            row = await jobs.job(self._mesh.state, self._wish.resident.job)
        except NotFound:
            return False
        return row.held.startswith("paused:")
