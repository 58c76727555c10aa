"""Who gets which chunk from whom, while hosts fetch versions and serve on what they have.

The source sends a chunk that nobody has to a host that passes it on, and so each about once; from
there on hosts get it from each other. Rarest first, as BitTorrent has it (Legout et al., IMC 2006),
and from whoever sends least; but one that knows all assigns, so nobody asks in vain. A host on a
slow link, or that serves nothing on, gets what others have already: it delays nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from common.api.weights import ChunkOrigin
from services.weights.relay.swarm import Seeker, Swarm

COPIES = 2  # of a chunk that leave the source, while hosts hold it that pass it on
UPLOADS = 3  # at once by a host: others on their way hide the pauses of one
SOURCE_UPLOADS = 4  # by the source, which everybody waits for
SOLE_UPLOADS = 16  # where one host alone fetches: several streams fill a long link
SOONEST_S, LATEST_S = 0.01, 0.1  # between two questions of one who has nothing to fetch
LOOKED_AT = 512  # chunks that a host lacks, of which the next one is chosen

SECOND = 1 << 20  # rank of a copy of what others have: after everything else
Rank = tuple[int, int]  # what comes first is less


def assign(swarm: Swarm, name: str, room: int, now: float) -> list[ChunkOrigin]:
    """What a process of the swarm is to fetch now: `room` chunks at most, on their way then."""
    found: list[ChunkOrigin] = []
    while len(found) < room and (pair := _next(swarm, swarm.seekers[name], now)) is not None:
        swarm.sends(name, pair.chunk, pair.source, now)
        found.append(pair)
    return found


def again_s(swarm: Swarm) -> float:
    """When a process that has room is to ask again: soon beside what a chunk takes."""
    return min(max(swarm.usual_s / 4, SOONEST_S), LATEST_S)


def _next(swarm: Swarm, seeker: Seeker, now: float) -> ChunkOrigin | None:
    """The rarest chunk that the process lacks and that somebody may send it now."""
    there = _Traffic(swarm, seeker, now)
    offers = [o for chunk in there.lacking() if (o := there.offer(chunk)) is not None]
    return min(offers, key=lambda offer: offer[0])[1] if offers else None


class _Traffic:
    """What is on its way at one moment, as it concerns one process."""

    def __init__(self, swarm: Swarm, seeker: Seeker, now: float) -> None:
        self._swarm, self._seeker, self._now = swarm, seeker, now
        self._sent: Counter[str] = Counter()  # chunks on their way, by source
        self._here: Counter[str] = Counter()  # those to this host
        self._coming: Counter[str] = Counter()  # by chunk, to hosts that pass it on
        self._own: set[str] = set()  # chunks that come to this host
        late_s, held_up_s = swarm.late_s, swarm.held_up_s
        self._slow = swarm.slow_sources(now)
        self._relays = {
            name: bool(one.server) and one.server not in self._slow
            for name, one in swarm.seekers.items()
        }
        self._passes_on = bool(seeker.server) and seeker.server not in self._slow
        for name, one in swarm.seekers.items():
            near = one.host == seeker.host
            for chunk, way in one.ways.items():
                if near:
                    self._own.add(chunk)
                    self._here[way.source] += 1
                self._sent[way.source] += now - way.since <= held_up_s
                self._coming[chunk] += now - way.since <= late_s and self._relays[name]
        self._alone = all(s.host == seeker.host or not s.lacking for s in swarm.seekers.values())

    def lacking(self) -> Iterator[str]:
        """Chunks that the process lacks, and that are on no way to its host."""
        looked_at = 0
        for chunk in self._seeker.lacking:
            if chunk not in self._own:
                yield chunk
                looked_at += 1
                if looked_at == LOOKED_AT:
                    return

    def offer(self, chunk: str) -> tuple[Rank, ChunkOrigin] | None:
        """From whom the process may have a chunk now, and how that ranks."""
        swarm, seeker = self._swarm, self._seeker
        peers = [
            peer
            for peer in swarm.holders.get(chunk, ())
            if peer != seeker.server
            and peer not in self._slow
            and not swarm.doubted(peer, seeker.host, self._now)
        ]
        rarity = len(peers) + self._coming[chunk]
        if free := [peer for peer in peers if self._free(peer)]:
            peer = min(free, key=self._sent.__getitem__)
            return (1 + self._sent[peer], rarity), ChunkOrigin(chunk, peer)
        source = swarm.source
        doubted = bool(peers) and swarm.doubted(source, seeker.host, self._now)
        if doubted or not self._free(source) or not self._may_leave(chunk, rarity):
            return None
        return (SECOND if rarity else 0, rarity), ChunkOrigin(chunk, source)

    def _may_leave(self, chunk: str, rarity: int) -> bool:
        """Whether the source may send a chunk that no peer can send now."""
        if not rarity:
            return self._passes_on or not self._awaited(chunk)
        return self._passes_on and self._swarm.copies.get(chunk, 0) < COPIES

    def _awaited(self, chunk: str) -> bool:
        """Whether a host that passes it on lacks the chunk, too, and so gets it first."""
        return any(
            self._relays[name] and chunk in one.lacking for name, one in self._swarm.seekers.items()
        )

    def _free(self, source: str) -> bool:
        """Whether a source may send one more, to this host."""
        if self._alone:
            return self._sent[source] < SOLE_UPLOADS
        most = SOURCE_UPLOADS if source == self._swarm.source else UPLOADS
        return self._sent[source] < most and not self._here[source]
