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
MESSAGE_S = 0.006  # from a request to the first byte
STREAMS = 2


@dataclass
class SwarmSimulation:
    """Simulated hosts that fetch one version.
    Attributes:
        link_rates: bytes per second of the links of hosts, LINK for all others.
        start_times: time in seconds at which a host starts, 0 for all others.
        no_upload_hosts: hosts that serve no chunks.
        exit_times: time in seconds at which the server of a host exits.
    """

    hosts: int
    chunks: int = 32
    chunk_bytes: int = 1 << 20
    link_rates: Mapping[int, float] = field(default_factory=dict)
    start_times: Mapping[int, float] = field(default_factory=dict)
    no_upload_hosts: frozenset[int] = frozenset()
    exit_times: Mapping[int, float] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.swarm = ChunkSwarm(SOURCE)
        self.finish_times: dict[int, float] = {}  # by host
        self.sent: Counter[str] = Counter()  # chunks sent by the source, by digest
        self.failed_count = 0
        self._missing = {n: {f"c{i}" for i in range(self.chunks)} for n in range(self.hosts)}
        self._running: dict[tuple[int, str], list[float]] = {}  # bytes left, by host and chunk
        self._sources: dict[tuple[int, str], str] = {}
        self._incoming_counts = Counter[int]()
        self._events: list[tuple[float, int, str, int, ChunkOrigin | None]] = []
        self._serial = itertools.count()
        for n in range(self.hosts):
            self._schedule(self.start_times.get(n, 0.0), "begins", n)

    def run(self, within_s: float = 300.0) -> SwarmSimulation:
        """Run until all hosts have all of the version."""
        while len(self.finish_times) < self.hosts:
            assert self.now < within_s, f"after {self.now} s {self._missing}"
            self._move_bytes()
            while self._events and self._events[0][0] <= self.now + 1e-9:
                self._handle_event(*heapq.heappop(self._events)[2:])
        return self

    def _schedule(
        self, time_s: float, kind: str, host: int, pair: ChunkOrigin | None = None
    ) -> None:
        heapq.heappush(self._events, (time_s, next(self._serial), kind, host, pair))

    def _rate(self, link: str) -> float:
        """Return the bytes per second of `up SOURCE`, `up nodeN` or `down N`."""
        host = link.rpartition(" ")[2].removeprefix("node")
        return LINK if host == SOURCE else self.link_rates.get(int(host), LINK)

    def _compute_rates(self) -> dict[tuple[int, str], float]:
        """Compute the max-min fair rate of each transfer over the links at both ends."""
        open_on: dict[str, set[tuple[int, str]]] = {}
        for transfer, source in self._sources.items():
            open_on.setdefault(f"up {source}", set()).add(transfer)
            open_on.setdefault(f"down {transfer[0]}", set()).add(transfer)
        capacity = {link: self._rate(link) for link in open_on}
        rates: dict[tuple[int, str], float] = {}
        while open_on:
            bottleneck = min(open_on, key=lambda link: capacity[link] / len(open_on[link]))
            rate = capacity[bottleneck] / len(open_on[bottleneck])
            for transfer in list(open_on[bottleneck]):
                rates[transfer] = rate
                for link in (f"up {self._sources[transfer]}", f"down {transfer[0]}"):
                    capacity[link] -= rate
                    open_on[link].discard(transfer)
            open_on = {link: transfers for link, transfers in open_on.items() if transfers}
        return rates

    def _move_bytes(self) -> None:
        """Move bytes until the next event, or the end of a transfer."""
        rates = self._compute_rates()
        end_times = [
            remaining[0] / rates[transfer] for transfer, remaining in self._running.items()
        ]
        step = min([*end_times, *([self._events[0][0] - self.now] if self._events else [])])
        self.now += max(step, 0.0)
        for transfer, remaining in list(self._running.items()):
            remaining[0] -= rates[transfer] * max(step, 0.0)
            if remaining[0] <= 1.0:
                source = self._end_transfer(transfer)
                self.sent[transfer[1]] += source == SOURCE
                self._missing[transfer[0]].discard(transfer[1])
                if not self._missing[transfer[0]]:
                    self.finish_times[transfer[0]] = self.now
                self._schedule(
                    self.now + MESSAGE_S / 2, "came", transfer[0], ChunkOrigin(transfer[1], source)
                )

    def _end_transfer(self, transfer: tuple[int, str]) -> str:
        del self._running[transfer]
        self._incoming_counts[transfer[0]] -= 1
        return self._sources.pop(transfer)

    def _handle_event(self, kind: str, host: int, pair: ChunkOrigin | None) -> None:
        name = f"engine{host}"
        if kind == "begins":
            server = "" if host in self.no_upload_hosts else f"node{host}"
            self.swarm.register(name, name, server, sorted(self._missing[host]), self.now)
        elif kind == "flows" and pair is not None:
            if self._has_exited(pair.source):
                self.failed_count += 1
                self._incoming_counts[host] -= 1
                self._schedule(self.now + MESSAGE_S / 2, "failed", host, pair)
            else:
                self._running[host, pair.chunk] = [float(self.chunk_bytes)]
                self._sources[host, pair.chunk] = pair.source
            return
        self.swarm.touch_downloader(name, self.now)
        if kind == "came" and pair is not None:
            self.swarm.add_holder(name, [pair.chunk], self.now)
        elif kind == "failed" and pair is not None:
            self.swarm.fail_transfer(name, pair.chunk, pair.source, False, self.now)
        self._request_sources(host, name)

    def _has_exited(self, source: str) -> bool:
        return source != SOURCE and self.exit_times.get(int(source[4:]), 1e9) <= self.now

    def _request_sources(self, host: int, name: str) -> None:
        if not self.swarm.downloaders[name].missing:
            return
        pairs = assign_sources(self.swarm, name, STREAMS - self._incoming_counts[host], self.now)
        for pair in pairs:
            assert pair.source != f"node{host}" and pair.chunk in self._missing[host]
            assert pair.source == SOURCE or pair.source in self.swarm.holders[pair.chunk]
            self._incoming_counts[host] += 1
            self._schedule(self.now + MESSAGE_S / 2, "flows", host, pair)
        if self._incoming_counts[host] < STREAMS and not any(
            kind == "asks" and event_host == host for _, _, kind, event_host, _ in self._events
        ):
            self._schedule(self.now + compute_retry_s(self.swarm), "asks", host)
