"""How far this host is from the head: the round trip to Redis, and how its clock differs from that
of Redis' host.
"""

from __future__ import annotations

from common.api.worker.stats import DistanceStats
from common.base.errors import DeadlineExceeded, StateUnavailable
from common.mesh.runtime.mesh import Mesh
from common.state.redis.client import server_ms

LOOK_S = 10.0
ANSWER_S = 5.0
SAMPLES = 3  # the shortest trip of so many tells most


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
            await self._mesh.clock.sleep(LOOK_S)

    async def _look(self) -> tuple[float, float]:
        """The round trip, and by how much this clock is ahead: Redis told its time about in the
        middle.
        """
        clock = self._mesh.clock
        before = clock.monotonic()
        theirs = await server_ms(self._mesh.state)
        trip_ms = 1000 * (clock.monotonic() - before)
        return trip_ms, 1000 * clock.wall() - trip_ms / 2 - theirs
