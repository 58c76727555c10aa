"""Tells events of damage: what was set aside is told once Redis is there, and until then kept."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from common.base.errors import MeshError
from common.base.files import damage
from common.mesh.runtime.mesh import Mesh
from common.state import events


@dataclass
class _Event:
    fields: dict[str, Any]
    op: str  # by which it is told once, also when nobody heard that it was told


class Untold:
    """Events in the order in which the damage was found. Nobody finds it a second time."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._waiting: deque[_Event] = deque()
        self._telling = asyncio.Lock()

    def add(self, told: dict[str, Any], op: str = "") -> None:
        """Has it told with the next `tell_all`, which a sweep does every few seconds. From any
        thread: whoever moves a file adds it in the same breath, and no caller's end comes between.
        """
        self._waiting.append(_Event(told, op or uuid.uuid4().hex))

    async def tell(self, told: dict[str, Any]) -> None:
        """Tells it now, or with a later `tell_all`."""
        self.add(told)
        await self.tell_all()

    async def tell_all(self) -> None:
        """Tells what it can; while Redis takes none, the rest waits."""
        async with self._telling:
            while self._waiting:
                event = self._waiting[0]
                try:
                    await events.append(self._mesh.state, damage.EVENT, event.fields, event.op)
                except MeshError as error:
                    self._mesh.telemetry.log.warning("damage is untold", error=str(error))
                    return
                self._waiting.popleft()
