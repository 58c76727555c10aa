"""Answers processes that fetch: a shell around the swarm, which waits for nobody."""

from __future__ import annotations

from common.api.weights import Seek, Sources
from common.base.clock import Clock
from services.weights.relay.relaying import again_s, assign
from services.weights.relay.swarm import Swarm

FORGET_S = 1.0  # between two looks for what is old


class Tracker:
    """What the store answers to Seek. `source`: the store's name."""

    def __init__(self, clock: Clock, source: str) -> None:
        self._clock, self._swarm = clock, Swarm(source)
        self._looked_at = 0.0

    def answer(self, seek: Seek) -> Sources:
        """Who is to be asked for what, after what is told."""
        swarm, now = self._swarm, self._clock.monotonic()
        if now - self._looked_at > FORGET_S:
            self._looked_at = now
            swarm.forget(now)
        if seek.lacking is not None:
            swarm.begins(seek.name, seek.host, seek.server, seek.lacking, now)
        if not swarm.knows(seek.name, now):
            return Sources([], again_s(swarm), known=seek.over)
        swarm.holds(seek.name, seek.held, now)
        for failed in seek.failed:
            swarm.fails(seek.name, failed.chunk, failed.source, failed.gone, now)
        if seek.over:
            swarm.leaves(seek.name)
            return Sources([], again_s(swarm))
        return Sources(assign(swarm, seek.name, seek.room, now), again_s(swarm))

    def stats(self) -> dict[str, int]:
        """How many processes fetch, and of how many chunks hosts are known that have them."""
        return {"seeking": len(self._swarm.seekers), "relayed": len(self._swarm.holders)}
