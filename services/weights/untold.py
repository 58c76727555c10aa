"""Tells events of damage: what was set aside is told once Redis is there, and until then kept."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from common.errors import MeshError
from common.records import damage
from common.runtime.mesh import Mesh
from common.state import events


class Untold:
    """Events in the order in which the damage was found. Nobody finds it a second time."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._waiting: deque[dict[str, Any]] = deque()
        self._telling = asyncio.Lock()

    async def tell(self, told: dict[str, Any]) -> None:
        """Tells it now, or with a later `tell_all`."""
        self._waiting.append(told)
        await self.tell_all()

    async def tell_all(self) -> None:
        """Tells what it can; while Redis takes none, the rest waits."""
        async with self._telling:
            while self._waiting:
                try:
                    await events.append(self._mesh.state, damage.EVENT, self._waiting[0])
                except MeshError as error:
                    self._mesh.telemetry.log.warning("damage is untold", error=str(error))
                    return
                self._waiting.popleft()
