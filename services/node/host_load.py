"""How a host fares, as its agent publishes it: how busy its processors are, how much memory is
left, and how far it is from the head, by the round trip to Redis and by how its clock differs
from that of Redis' host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from meshrl.common.api.stats import DistanceStats, HostLoadStats
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.redis.client import server_ms

LOOK_S = 1.0
WINDOW_S = 5.0  # that `busy_cores` is the mean of
DISTANCE_LOOK_S = 10.0
ANSWER_S = 5.0
SAMPLES = 3  # the shortest trip of so many tells most


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


class Distance:
    """Statistics of the last look; none before the first."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.stats = DistanceStats()

    async def run(self) -> None:
        while True:
            try:
                async with self._mesh.clock.timeout(ANSWER_S, "a look at the distance"):
                    trip_ms, ahead_ms = min([await self._look() for _ in range(SAMPLES)])
                self.stats = DistanceStats(round(trip_ms, 2), round(ahead_ms, 1))
            except (StateUnavailable, DeadlineExceeded):
                self.stats = DistanceStats()
            await self._mesh.clock.sleep(DISTANCE_LOOK_S)

    async def _look(self) -> tuple[float, float]:
        """The round trip, and by how much this clock is ahead: Redis told its time about in the
        middle.
        """
        clock = self._mesh.clock
        before = clock.monotonic()
        theirs = await server_ms(self._mesh.state)
        trip_ms = 1000 * (clock.monotonic() - before)
        return trip_ms, 1000 * clock.wall() - trip_ms / 2 - theirs
