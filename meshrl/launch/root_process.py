"""Root process of a host's part of a mesh, the head's or another's, and its published state."""

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
    """Processes of a host's part of a mesh, and the lock of its directory.

    `state` and `settings` exist once the mesh's Redis is known. `failed` is set, with
    `failure_reason`, when the host's part cannot continue.
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
        """Client of the mesh's Redis, and the settings of processes here; None before they are
        known.
        """
        return (self.state, self.settings) if hasattr(self, "state") else None

    @property
    def is_ready(self) -> bool:
        """True once everything that belongs to the root process has started."""
        return self._directory_lock.is_ready

    @property
    def planned_services(self) -> tuple[str, ...]:
        return self._services.planned_services

    @property
    def unready_reason(self) -> str:
        """Reason why the started root process is not ready; empty if it is."""
        return self._services.down_reason
