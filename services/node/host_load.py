"""How busy this host's processors are, and how much memory is left, as its agent publishes it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from common.api.worker.stats import HostLoadStats
from common.mesh.runtime.mesh import Mesh

LOOK_S = 1.0
WINDOW_S = 5.0  # that `busy_cores` is the mean of


class HostLoad:
    """Statistics of the last look; none of the processors before the second."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        """`directory` is on the disk whose room is told."""
        self._mesh, self._directory = mesh, directory
        self._looks: deque[tuple[float, float]] = deque()  # when, and busy seconds until then
        self.stats = HostLoadStats()

    async def run(self) -> None:
        while True:
            self.look()
            await self._mesh.clock.sleep(LOOK_S)

    def look(self) -> None:
        now, (number, busy_s) = self._mesh.clock.monotonic(), self._mesh.host.cores()
        self._looks.append((now, busy_s))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()
        since, before_s = self._looks[0]
        room = self._mesh.host.room(self._directory)
        self.stats = HostLoadStats(room.memory, room.disk)
        if number and now > since:
            busy = (busy_s - before_s) / (now - since)
            self.stats = replace(self.stats, cores=number, busy_cores=round(min(busy, number), 2))
