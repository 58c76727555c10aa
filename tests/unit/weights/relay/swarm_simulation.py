"""Hosts that fetch a version by their source assignments in virtual time.

Each host has links of its own. Transfers share the links at both ends evenly, and every message to
the store takes a while.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.common.api.weights import ChunkOrigin
from meshrl.services.weights.tracker import ChunkSwarm, assign_sources, compute_retry_s

SOURCE = "weights"
LINK = 20e6  # bytes a second, up and down
WORD_S = 0.006  # from a question to the first byte
STREAMS = 2


@dataclass
class World:
    """`links`: of hosts that have another one; `starts`: of those that come later; `mute`: hosts
    that serve nothing on; `dies`: the servers of hosts end then.
    """

    hosts: int
    chunks: int = 32
    chunk_bytes: int = 1 << 20
    links: Mapping[int, float] = field(default_factory=dict)
    starts: Mapping[int, float] = field(default_factory=dict)
    mute: frozenset[int] = frozenset()
    dies: Mapping[int, float] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.swarm = ChunkSwarm(SOURCE)
        self.done: dict[int, float] = {}  # when, by host
        self.sent: Counter[str] = Counter()  # by the source, by chunk
        self.lost = 0
        self._lacking = {n: {f"c{i}" for i in range(self.chunks)} for n in range(self.hosts)}
        self._running: dict[tuple[int, str], list[float]] = {}  # bytes left, by host and chunk
        self._from: dict[tuple[int, str], str] = {}
        self._coming = Counter[int]()
        self._events: list[tuple[float, int, str, int, ChunkOrigin | None]] = []
        self._serial = itertools.count()
        for n in range(self.hosts):
            self._at(self.starts.get(n, 0.0), "begins", n)

    def run(self, within_s: float = 300.0) -> World:
        """Run until all hosts have all of the version."""
        while len(self.done) < self.hosts:
            assert self.now < within_s, f"after {self.now} s {self._lacking}"
            self._flow()
            while self._events and self._events[0][0] <= self.now + 1e-9:
                self._happens(*heapq.heappop(self._events)[2:])
        return self

    def _at(self, when: float, what: str, host: int, pair: ChunkOrigin | None = None) -> None:
        heapq.heappush(self._events, (when, next(self._serial), what, host, pair))

    def _rate(self, link: str) -> float:
        """Return the bytes per second of `up SOURCE`, `up nodeN` and `down N`."""
        host = link.rpartition(" ")[2].removeprefix("node")
        return LINK if host == SOURCE else self.links.get(int(host), LINK)

    def _speeds(self) -> dict[tuple[int, str], float]:
        """Compute each transfer's max-min fair share of the links at its ends: others take what one
        cannot use.
        """
        open_on: dict[str, set[tuple[int, str]]] = {}
        for way, source in self._from.items():
            open_on.setdefault(f"up {source}", set()).add(way)
            open_on.setdefault(f"down {way[0]}", set()).add(way)
        left = {link: self._rate(link) for link in open_on}
        found: dict[tuple[int, str], float] = {}
        while open_on:
            tight = min(open_on, key=lambda link: left[link] / len(open_on[link]))
            speed = left[tight] / len(open_on[tight])
            for way in list(open_on[tight]):
                found[way] = speed
                for link in (f"up {self._from[way]}", f"down {way[0]}"):
                    left[link] -= speed
                    open_on[link].discard(way)
            open_on = {link: ways for link, ways in open_on.items() if ways}
        return found

    def _flow(self) -> None:
        """Move bytes until the next event, or the end of a transfer."""
        speeds = self._speeds()
        ends = [left[0] / speeds[way] for way, left in self._running.items()]
        step = min([*ends, *([self._events[0][0] - self.now] if self._events else [])])
        self.now += max(step, 0.0)
        for way, left in list(self._running.items()):
            left[0] -= speeds[way] * max(step, 0.0)
            if left[0] <= 1.0:
                source = self._ended(way)
                self.sent[way[1]] += source == SOURCE
                self._lacking[way[0]].discard(way[1])
                if not self._lacking[way[0]]:
                    self.done[way[0]] = self.now
                self._at(self.now + WORD_S / 2, "came", way[0], ChunkOrigin(way[1], source))

    def _ended(self, way: tuple[int, str]) -> str:
        del self._running[way]
        self._coming[way[0]] -= 1
        return self._from.pop(way)

    def _happens(self, what: str, host: int, pair: ChunkOrigin | None) -> None:
        name = f"engine{host}"
        if what == "begins":
            server = "" if host in self.mute else f"node{host}"
            self.swarm.register(name, name, server, sorted(self._lacking[host]), self.now)
        elif what == "flows" and pair is not None:
            if self._dead(pair.source):
                self.lost += 1
                self._coming[host] -= 1
                self._at(self.now + WORD_S / 2, "failed", host, pair)
            else:
                self._running[host, pair.chunk] = [float(self.chunk_bytes)]
                self._from[host, pair.chunk] = pair.source
            return
        self.swarm.touch_downloader(name, self.now)
        if what == "came" and pair is not None:
            self.swarm.add_holder(name, [pair.chunk], self.now)
        elif what == "failed" and pair is not None:
            self.swarm.fail_transfer(name, pair.chunk, pair.source, False, self.now)
        self._asks(host, name)

    def _dead(self, source: str) -> bool:
        return source != SOURCE and self.dies.get(int(source[4:]), 1e9) <= self.now

    def _asks(self, host: int, name: str) -> None:
        if not self.swarm.downloaders[name].missing:
            return
        pairs = assign_sources(self.swarm, name, STREAMS - self._coming[host], self.now)
        for pair in pairs:
            assert pair.source != f"node{host}" and pair.chunk in self._lacking[host]
            assert pair.source == SOURCE or pair.source in self.swarm.holders[pair.chunk]
            self._coming[host] += 1
            self._at(self.now + WORD_S / 2, "flows", host, pair)
        if self._coming[host] < STREAMS and not any(
            what == "asks" and whose == host for _, _, what, whose, _ in self._events
        ):
            self._at(self.now + compute_retry_s(self.swarm), "asks", host)
