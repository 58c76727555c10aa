"""Progress of a role process from its start until it is ready.

A warm start or a replay may take hours, and publishes its progress as `progress` in its stats.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from meshrl.common.base.errors import NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs, registry
from meshrl.common.state.registry import RegistryEntry
from meshrl.services.node.instances.desired_roles import DesiredRole

NO_PROGRESS_TIMEOUT_S = 300.0  # longest time without progress until a started process is ready
PAUSED_POLL_S = 15.0  # between two checks whether its job is paused, while it starts


class StartupState(Enum):
    """State of a process that was started."""

    READY = auto()
    STARTING = auto()
    TIMED_OUT = auto()  # no progress for NO_PROGRESS_TIMEOUT_S


class Startup:
    """Watch over one role process until its registry entry reports that it is ready."""

    def __init__(self, mesh: Mesh, desired: DesiredRole) -> None:
        self._mesh, self._desired = mesh, desired
        self.progress: Any = None  # last progress that the process has published
        self._last_progress_at = 0.0  # when it last changed
        self._paused_polled_at = mesh.clock.monotonic()
        self._entry: RegistryEntry | None = None  # the last one of the process

    def restart_timer(self) -> None:
        """Restart the count of seconds without progress."""
        self.progress, self._last_progress_at = None, self._mesh.clock.monotonic()

    async def poll(self, pid: int) -> StartupState:
        """Return the state of the process with this pid, from its registry entry.

        It times out after NO_PROGRESS_TIMEOUT_S without progress, unless its job is paused.
        """
        entry = await self._read_entry(pid)
        now = self._mesh.clock.monotonic()
        stats: dict[str, Any] = entry.stats if entry is not None else {}
        generation = self._desired.instance.generation
        if stats.get("generation") == generation and stats.get("ready") is True:
            return StartupState.READY
        if stats.get("progress") not in (None, self.progress):
            self.progress, self._last_progress_at = stats["progress"], now
        elif now - self._paused_polled_at > PAUSED_POLL_S and await self._job_is_paused():
            self._last_progress_at = now
        elif now - self._last_progress_at > NO_PROGRESS_TIMEOUT_S:
            return StartupState.TIMED_OUT
        return StartupState.STARTING

    async def find_entry(self, pid: int, incarnation: str) -> RegistryEntry | None:
        """Return the registry entry of the process with this pid; None if it is another one."""
        entry = self._entry
        if entry is None or (entry.pid, entry.incarnation) != (pid, incarnation):
            entry = await self._read_entry(pid)
        return entry if entry is not None and entry.incarnation == incarnation else None

    async def _read_entry(self, pid: int) -> RegistryEntry | None:
        entry = await registry.lookup(self._mesh.state, self._desired.name)
        expected_identity = True, self._mesh.settings.host, pid
        if entry is None or (entry.alive, entry.host, entry.pid) != expected_identity:
            return None
        self._entry = entry
        return entry

    async def _job_is_paused(self) -> bool:
        self._paused_polled_at = self._mesh.clock.monotonic()
        try:
            row = await jobs.read_job(self._mesh.state, self._desired.instance.job)
        except NotFound:
            return False
        return row.block_reason.startswith("paused:")
