"""What the store knows of who holds and who fetches which chunks. All of it is soft: what a restart
of the store forgets is told again, and what is wrong costs a transfer that fails.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LATE = 4.0  # times what a chunk takes usually: then nobody counts on the host that it goes to
LATE_S = 0.5  # it is late after that at the least
SILENT_S = 5.0  # without a word: a process that fetches says one each second
DOUBTED_S = 5.0  # after a failed transfer, by the host that told of it
DOUBTERS = 2  # hosts whose transfers from one failed: nobody is sent there
HELD_S = 3600.0  # hosts drop what nobody has used for that long
RECENT = 64  # chunks that tell what is usual
LATELY = 4  # that tell how fast one host is: slow is who took long for each of them


@dataclass(frozen=True)
class ChunkTransfer:
    """A chunk on its way to a process, which was sent to `source` for it."""

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
                for took in (self._took, seeker.took, self._sent(way.source)):
                    took.append(now - way.since)
            if seeker.server:
                self.holders.setdefault(chunk, {})[seeker.server] = None
            self._touch(chunk, now)

    def sends(self, name: str, chunk: str, source: str, now: float) -> None:
        """A process is told to fetch a chunk from a source."""
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
        """A process fetches no more."""
        self.seekers.pop(name, None)

    def forget(self, now: float) -> None:
        """What is old: processes that say nothing, chunks that hosts have dropped since."""
        for name in [n for n, s in self.seekers.items() if now - s.seen > SILENT_S]:
            self.leaves(name)
        for source, by_host in list(self._doubts.items()):
            if all(until <= now for until in by_host.values()):
                del self._doubts[source]
        self._took_from = {s: took for s, took in self._took_from.items() if s in self._servers()}
        for chunk, at in list(self._touched.items()):
            if now - at <= HELD_S:
                break
            for known in (self._touched, self.holders, self.copies):
                known.pop(chunk, None)

    def _servers(self) -> set[str]:
        return {s.server for s in self.seekers.values()} | {self.source}

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

    def _sent(self, source: str) -> deque[float]:
        return self._took_from.setdefault(source, deque(maxlen=LATELY))

    def doubted(self, source: str, host: str, now: float) -> bool:
        """Whether a host should not be sent to a source: transfers from there have failed."""
        doubts = self._doubts.get(source, {})
        doubters = sum(until > now for until in doubts.values())
        return doubts.get(host, 0.0) > now or (source != self.source and doubters >= DOUBTERS)
