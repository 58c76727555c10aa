"""The root process of a host's part of a mesh, the head's or another's, and what it says of itself
while it runs.
"""

from __future__ import annotations

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.directory_lock import DirectoryLock
from meshrl.launch.services.service_supervisor import HostServices
from meshrl.launch.shutdown import STOP_TIMEOUT_S


class RootProcess:
    """The processes of a host's part of a mesh, and the hold on its directory. `state` and
    `settings` are there once the mesh's Redis is known; `failed` is set, with the reason in `why`,
    when it cannot go on.
    """

    state: StateClient
    settings: MeshSettings

    def __init__(
        self,
        mesh_paths: MeshPaths,
        *,
        waits_for_head: bool = False,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self.mesh_paths = mesh_paths
        self.clock, self.host = SystemClock(), SystemHost()
        self._services = HostServices(
            self.host, self.clock, mesh_paths, waits_for_head=waits_for_head
        )
        self._directory_lock = DirectoryLock(mesh_paths, stop_timeout_s)
        self.failed = self._services.failed

    @property
    def failure_reason(self) -> str:
        return self._services.failure_reason

    @property
    def connection(self) -> tuple[StateClient, MeshSettings] | None:
        """The mesh's Redis, and what processes here are told; None before it is known."""
        return (self.state, self.settings) if hasattr(self, "state") else None

    @property
    def is_ready(self) -> bool:
        """Whether all that belongs to it has come up."""
        return self._directory_lock.is_ready

    @property
    def planned_services(self) -> tuple[str, ...]:
        return self._services.planned_services

    @property
    def unready_reason(self) -> str:
        """Why it does not do its work now, though it has come up; empty: it does."""
        return self._services.down_reason
