"""The root process of a host's part of a mesh, the head's or another's, and what it says of itself
while it runs.
"""

from __future__ import annotations

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace
from meshrl.launch.ending import STOP_S
from meshrl.launch.holding import Hold
from meshrl.launch.services.services import Services


class RootProcess:
    """The processes of a host's part of a mesh, and the hold on its directory. `state` and
    `settings` are there once the mesh's Redis is known; `failed` is set, with the reason in `why`,
    when it cannot go on.
    """

    state: State
    settings: MeshSettings

    def __init__(self, place: MeshPlace, *, patient: bool = False, end_s: float = STOP_S) -> None:
        self.place = place
        self.clock, self.host = SystemClock(), SystemHost()
        self._services = Services(self.host, self.clock, place, patient=patient)
        self._hold = Hold(place, end_s)
        self.failed = self._services.failed

    @property
    def why(self) -> str:
        return self._services.why

    @property
    def reached(self) -> tuple[State, MeshSettings] | None:
        """The mesh's Redis, and what processes here are told; None before it is known."""
        return (self.state, self.settings) if hasattr(self, "state") else None

    @property
    def ready(self) -> bool:
        """Whether all that belongs to it has come up."""
        return self._hold.ready

    @property
    def planned(self) -> tuple[str, ...]:
        return self._services.planned

    @property
    def hindered(self) -> str:
        """Why it does not do its work now, though it has come up; empty: it does."""
        return self._services.down
