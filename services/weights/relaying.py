"""Who gets which chunk from whom, while hosts fetch versions and serve on what they have.

The source sends a chunk that nobody has to a host that passes it on, and so each about once; from
there on hosts get it from each other. Rarest first, as BitTorrent has it (Legout et al., IMC 2006),
and from whoever sends least; but one that knows all assigns, so nobody asks in vain. A host on a
slow link, or that serves nothing on, gets what others have already: it delays nobody.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshrl.common.api.weights import ChunkOrigin, Seek, Sources
from meshrl.common.base.clock import Clock

LATE = 4.0  # times what a chunk takes usually: then nobody counts on the host that it goes to
LATE_S = 0.5  # it is late after that at the least
SILENT_S = 5.0  # without a word: a process that fetches says one each second
DOUBTED_S = 5.0  # after a failed transfer, by the host that told of it
DOUBTERS = 2  # hosts whose transfers from one failed: nobody is sent there
HELD_S = 3600.0  # hosts drop what nobody has used for that long
RECENT = 64  # chunks that tell what is usual
LATELY = 4  # that tell how fast one host is: slow is who took long for each of them
COPIES = 2  # of a chunk that leave the source, while hosts hold it that pass it on
UPLOADS = 3  # at once by a host: others on their way hide the pauses of one
SOURCE_UPLOADS = 4  # by the source, which everybody waits for
SOLE_UPLOADS = 16  # where one host alone fetches: several streams fill a long link
SOONEST_S, LATEST_S = 0.01, 0.1  # between two questions of one who has nothing to fetch
LOOKED_AT = 512  # chunks that a host lacks, of which the next one is chosen
SECOND = 1 << 20  # rank of a copy of what others have: after everything else
Rank = tuple[int, int]  # what comes first is less
FORGET_S = 1.0  # between two looks for what is old


@dataclass(frozen=True)
class ChunkTransfer:
    source: str
    since: float


@dataclass
class Seeker:
    """A process that fetches. `server` serves on what its host has; empty: nobody does."""

    host: str
    server: str
    lacking: dict[str, None]
    seen: float
    ways: dict[str, ChunkTransfer] = field(default_factory=dict)  # by chunk
    came_at: float = 0.0  # the last chunk
    took: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))  # seconds for a chunk


class Swarm:
    """Processes that fetch chunks of one source, by its name; `now`, everywhere, in seconds of one
    clock.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.seekers: dict[str, Seeker] = {}
        self.holders: dict[str, dict[str, None]] = {}  # servers by chunk
        self.copies: dict[str, int] = {}  # that have left the source, or are on their way
        self._doubts: dict[str, dict[str, float]] = {}  # until when, by source and host
        self._touched: dict[str, float] = {}  # chunks, those that were spoken of last at the end
        self._took: deque[float] = deque(maxlen=RECENT)  # seconds for a chunk
        self._took_from: dict[str, deque[float]] = {}  # the same, by source

    # ------------------------------------------------------------ what processes tell

    def begins(self, name: str, host: str, server: str, lacking: Iterable[str], now: float) -> None:
        """A process begins to fetch, or tells again because the store has forgotten it."""
        # Of equally rare chunks each host takes another one first.
        order = sorted(lacking, key=lambda chunk: zlib.crc32(f"{host} {chunk}".encode()))
        self.seekers[name] = Seeker(host, server, dict.fromkeys(order), now)

    def knows(self, name: str, now: float) -> bool:
        """Whether a process has begun; it is there still."""
        if (seeker := self.seekers.get(name)) is not None:
            seeker.seen = now
        return seeker is not None

    def holds(self, name: str, chunks: Iterable[str], now: float) -> None:
        """Chunks are on the host of a process, whoever has fetched them."""
        seeker = self.seekers[name]
        near = [one for one in self.seekers.values() if one.host == seeker.host]
        for chunk in chunks:
            for one in near:
                one.lacking.pop(chunk, None)
            if (way := seeker.ways.pop(chunk, None)) is not None:
                seeker.came_at = now
                sent = self._took_from.setdefault(way.source, deque(maxlen=LATELY))
                for took in (self._took, seeker.took, sent):
                    took.append(now - way.since)
            if seeker.server:
                self.holders.setdefault(chunk, {})[seeker.server] = None
            self._touch(chunk, now)

    def sends(self, name: str, chunk: str, source: str, now: float) -> None:
        self.seekers[name].ways[chunk] = ChunkTransfer(source, now)
        if source == self.source:
            self.copies[chunk] = self.copies.get(chunk, 0) + 1
        self._touch(chunk, now)

    def fails(self, name: str, chunk: str, source: str, gone: bool, now: float) -> None:
        """A transfer has ended early. `gone`: the source has not got the chunk as it should be."""
        seeker = self.seekers[name]
        seeker.ways.pop(chunk, None)
        if gone:
            self.holders.get(chunk, {}).pop(source, None)
        else:
            self._doubts.setdefault(source, {})[seeker.host] = now + DOUBTED_S

    def leaves(self, name: str) -> None:
        self.seekers.pop(name, None)

    def forget(self, now: float) -> None:
        """What is old: processes that say nothing, chunks that hosts have dropped since."""
        for name in [n for n, s in self.seekers.items() if now - s.seen > SILENT_S]:
            self.leaves(name)
        for source, by_host in list(self._doubts.items()):
            if all(until <= now for until in by_host.values()):
                del self._doubts[source]
        servers = {s.server for s in self.seekers.values()} | {self.source}
        self._took_from = {s: took for s, took in self._took_from.items() if s in servers}
        for chunk, at in list(self._touched.items()):
            if now - at <= HELD_S:
                break
            for known in (self._touched, self.holders, self.copies):
                known.pop(chunk, None)

    def _touch(self, chunk: str, now: float) -> None:
        self._touched.pop(chunk, None)
        self._touched[chunk] = now

    # ------------------------------------------------------------ what follows from it

    @property
    def usual_s(self) -> float:
        """What a chunk takes, of those that arrived last; infinite before the first."""
        return statistics.median(self._took) if self._took else math.inf

    @property
    def late_s(self) -> float:
        """How long a chunk is on its way until nobody counts on it."""
        return max(LATE_S, LATE * self.usual_s)

    @property
    def held_up_s(self) -> float:
        """How long it keeps others from its source: nobody knows who is slow before the first one
        has arrived.
        """
        return self.late_s if self._took else LATE_S

    def slow(self, seeker: Seeker, now: float) -> bool:
        """Whether chunks take much longer to this process than to others."""
        oldest = min((way.since for way in seeker.ways.values()), default=now)
        waits_s = now - max(oldest, seeker.came_at)
        return max(waits_s, min(seeker.took, default=0.0)) > self.late_s

    def slow_sources(self, now: float) -> set[str]:
        """Hosts from which chunks take much longer than from others, or to which."""
        late_s = self.late_s
        found = {source for source, took in self._took_from.items() if min(took) > late_s}
        return found | {s.server for s in self.seekers.values() if self.slow(s, now)}

    def doubted(self, source: str, host: str, now: float) -> bool:
        """Whether a host should not be sent to a source: transfers from there have failed."""
        doubts = self._doubts.get(source, {})
        doubters = sum(until > now for until in doubts.values())
        return doubts.get(host, 0.0) > now or (source != self.source and doubters >= DOUBTERS)


def assign(swarm: Swarm, name: str, room: int, now: float) -> list[ChunkOrigin]:
    """What a process of the swarm is to fetch now: `room` chunks at most, on their way then."""
    found: list[ChunkOrigin] = []
    while len(found) < room:
        there = _Traffic(swarm, swarm.seekers[name], now)
        offers = [o for chunk in there.lacking() if (o := there.offer(chunk)) is not None]
        if not offers:
            break
        _, pair = min(offers, key=lambda offer: offer[0])
        swarm.sends(name, pair.chunk, pair.source, now)
        found.append(pair)
    return found


def again_s(swarm: Swarm) -> float:
    """When a process that has room is to ask again: soon beside what a chunk takes."""
    return min(max(swarm.usual_s / 4, SOONEST_S), LATEST_S)


class _Traffic:
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
        if rarity:
            may_leave = self._passes_on and swarm.copies.get(chunk, 0) < COPIES
        else:  # a host that passes it on, and lacks it too, gets it first
            may_leave = self._passes_on or not any(
                self._relays[name] and chunk in one.lacking for name, one in swarm.seekers.items()
            )
        if doubted or not may_leave or not self._free(source):
            return None
        return (SECOND if rarity else 0, rarity), ChunkOrigin(chunk, source)

    def _free(self, source: str) -> bool:
        """Whether a source may send one more, to this host."""
        if self._alone:
            return self._sent[source] < SOLE_UPLOADS
        most = SOURCE_UPLOADS if source == self._swarm.source else UPLOADS
        return self._sent[source] < most and not self._here[source]


class Tracker:
    def __init__(self, clock: Clock, source: str) -> None:
        self._clock, self._swarm = clock, Swarm(source)
        self._looked_at = 0.0

    def answer(self, seek: Seek) -> Sources:
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
        return {"seeking": len(self._swarm.seekers), "relayed": len(self._swarm.holders)}
