"""The root process of a host, as what it shows of the host sees it: the head's or another's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from common.base.clock import Clock
from common.base.host.settings import MeshSettings
from common.mesh.process.host import Host
from common.state.redis.client import State
from meshrl.directory.places import MeshPlace


class RootStatus(Protocol):
    """What a Launcher and a Hosting tell of themselves, on the event loop."""

    place: MeshPlace

    @property
    def clock(self) -> Clock:
        """The clock of its host."""

    @property
    def host(self) -> Host:
        """The host that it runs on."""

    @property
    def reached(self) -> tuple[State, MeshSettings] | None:
        """The mesh's Redis, and what processes here are told; None before it is known."""

    @property
    def ready(self) -> bool:
        """Whether all that belongs to it has come up."""

    @property
    def hindered(self) -> str:
        """Why it does not do its work now, though it has come up; empty: it does."""

    @property
    def planned(self) -> Sequence[str]:
        """Names of the services that it keeps running."""

    @property
    def failed(self) -> asyncio.Event:
        """Set when it cannot go on."""

    @property
    def why(self) -> str:
        """Why it cannot."""
