"""What the root process of a host's part of a mesh says of itself while it runs."""

from __future__ import annotations

import asyncio

from common.base.host.settings import MeshSettings
from common.state.redis.client import State
from meshrl.launch.holding import Hold
from meshrl.launch.services.services import Services


class RootProcess:
    """The processes of a host's part of a mesh, and the hold on its directory. `state` and
    `settings` are there once the mesh's Redis is known.
    """

    state: State
    settings: MeshSettings

    def __init__(self, services: Services, hold: Hold) -> None:
        self._services, self._hold = services, hold

    @property
    def failed(self) -> asyncio.Event:
        """Set, with the reason in `why`, when it cannot go on."""
        return self._services.failed

    @property
    def why(self) -> str:
        """Why it cannot."""
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
        """Names of the services that it keeps running."""
        return self._services.planned

    @property
    def hindered(self) -> str:
        """Why it does not do its work now; empty: it does."""
        return self._services.down
