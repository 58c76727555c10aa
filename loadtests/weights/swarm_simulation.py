"""Hosts that fetch versions by their source assignments in virtual time.

Each host has links of its own. Transfers share the links at both ends evenly, and every message to
the store takes a while.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.common.api.weights import ChunkOrigin
from meshrl.services.weights.chunk_swarm import ChunkSwarm
from meshrl.services.weights.tracker import assign_sources, compute_retry_s

SOURCE = "weights"
LINK = 20e6  # bytes a second, up and down
MESSAGE_S = 0.006  # from a request to the first byte
STREAMS = 2
ROUNDS = 4  # after which the rest of each link is left unused


@dataclass
class SwarmSimulation:
    """Simulated hosts that fetch a version, or the next one.

    Attributes:
        link_rates: bytes per second of the links of hosts, LINK for all others.
        start_times: time in seconds at which a host starts, 0 for all others.
        no_upload_hosts: hosts that serve no chunks.
        exit_times: time in seconds at which the server of a host exits.
        joiners: hosts without a version at their start.
        next_times: time in seconds at which a host begins to fetch the next version instead.
        first_holders: hosts that have the first version; they start with the next one.
        networks: names of the networks of hosts, the source's for all others.
    """

    hosts: int
    chunks: int = 32
    chunk_bytes: int = 1 << 20
    link_rates: Mapping[int, float] = field(default_factory=dict)
    start_times: Mapping[int, float] = field(default_factory=dict)
    no_upload_hosts: frozenset[int] = frozenset()
    exit_times: Mapping[int, float] = field(default_factory=dict)
    joiners: frozenset[int] = frozenset()
    next_times: Mapping[int, float] = field(default_factory=dict)
    first_holders: frozenset[int] = frozenset()
    networks: Mapping[int, str] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.swarm = ChunkSwarm(SOURCE)
        self.finish_times: dict[int, float] = {}  # by host, of its last version
        self.sent: Counter[str] = Counter()  # chunks sent by the source, by digest
        self.crossed: Counter[str] = Counter()  # chunks sent between networks, by digest
        self.failed_count = self.requests = 0
        self.tracker_s = 0.0  # CPU time of assignments
        self._missing = {n: {f"c{i}" for i in range(self.chunks)} for n in range(self.hosts)}
        self._running: dict[tuple[int, str], float] = {}  # bytes left, by host and chunk
        self._sources: dict[tuple[int, str], str] = {}
        self._rates: dict[tuple[int, str], float] | None = None  # None: transfers have changed
        self._incoming_counts = Counter[int]()
        self._fetches = Counter[int]()  # number of the current fetch by host
        self._asking: set[int] = set()  # hosts with a scheduled request
        self._events: list[tuple[float, int, str, int, int, ChunkOrigin | None]] = []
        self._serial = itertools.count()
        for n in range(self.hosts):
            if n in self.first_holders:
                self._register(n, [])
                self.swarm.add_holder(self._name(n), sorted(self._missing[n]), 0.0)
                self.swarm.unregister(self._name(n))
            else:
                self._schedule(self.start_times.get(n, 0.0), "begins", n)
            if n in self.next_times:
                self._schedule(self.next_times[n], "next", n)

    def run(self, within_s: float = 300.0) -> SwarmSimulation:
        """Run until all hosts have all of their last version."""
        while len(self.finish_times) < self.hosts:
            assert self.now < within_s, f"after {self.now} s {self._missing}"
            self._move_bytes()
            while self._events and self._events[0][0] <= self.now + 1e-9:
                self._handle_event(*heapq.heappop(self._events)[2:])
        return self

    def _name(self, host: int) -> str:
        return f"engine{host}.{self._fetches[host]}"

    def _register(self, host: int, missing: list[str]) -> None:
        server = "" if host in self.no_upload_hosts else f"node{host}"
        self.swarm.register(
            self._name(host),
            f"host{host}",
            server,
            missing,
            self.now,
            network=self.networks.get(host, ""),
            is_joining=host in self.joiners,
        )

    def _schedule(
        self, time_s: float, kind: str, host: int, pair: ChunkOrigin | None = None
    ) -> None:
        event = time_s, next(self._serial), kind, host, self._fetches[host], pair
        heapq.heappush(self._events, event)

    def _rate(self, link: str) -> float:
        """Return the bytes per second of `weights`, `nodeN` (up) or `N` (down)."""
        if link == SOURCE:
            return LINK
        return self.link_rates.get(int(link.removeprefix("node")), LINK)

    def _compute_rates(self) -> dict[tuple[int, str], float]:
        """Compute the rate of each transfer: max-min fair, as far as ROUNDS rounds get."""
        links: dict[str, list[tuple[int, str]]] = {}
        ends = {one: (source, str(one[0])) for one, source in self._sources.items()}
        for transfer, both in ends.items():
            for link in both:
                links.setdefault(link, []).append(transfer)
        left = {link: self._rate(link) for link in links}
        pending, rates = set(ends), dict[tuple[int, str], float]()
        for _ in range(ROUNDS):
            share = {
                link: left[link] / max(1, sum(one in pending for one in transfers))
                for link, transfers in links.items()
            }
            for transfer in pending:
                up, down = ends[transfer]
                rates[transfer] = min(share[up], share[down])
            fixed = {
                transfer
                for link, transfers in links.items()
                if all(rates[one] == share[link] for one in transfers if one in pending)
                for transfer in transfers
                if transfer in pending
            }
            for transfer in fixed:
                for link in ends[transfer]:
                    left[link] -= rates[transfer]
            pending -= fixed
            if not pending:
                break
        return rates

    def _move_bytes(self) -> None:
        """Move bytes until the next event, or the end of a transfer."""
        if self._rates is None:
            self._rates = self._compute_rates()
        rates = self._rates
        end_times = [remaining / rates[one] for one, remaining in self._running.items()]
        step = min([*end_times, *([self._events[0][0] - self.now] if self._events else [])])
        self.now += max(step, 0.0)
        if step <= 0:
            return
        for transfer in list(self._running):
            self._running[transfer] -= rates[transfer] * step
            if self._running[transfer] <= 1.0:
                source = self._end_transfer(transfer)
                host, chunk = transfer
                self.sent[chunk] += source == SOURCE
                network = "" if source == SOURCE else self.networks.get(int(source[4:]), "")
                self.crossed[chunk] += network != self.networks.get(host, "")
                self._missing[host].discard(chunk)
                if not self._missing[host] and self._has_last_version(host):
                    self.finish_times[host] = self.now
                pair = ChunkOrigin(chunk, source)
                self._schedule(self.now + MESSAGE_S / 2, "came", host, pair)

    def _has_last_version(self, host: int) -> bool:
        return host not in self.next_times or self._fetches[host] > 0

    def _end_transfer(self, transfer: tuple[int, str]) -> str:
        del self._running[transfer]
        self._rates = None
        self._incoming_counts[transfer[0]] -= 1
        return self._sources.pop(transfer)

    def _begin_next(self, host: int) -> None:
        """Give up the fetch of the first version for the next one."""
        for transfer in [one for one in self._running if one[0] == host]:
            self._end_transfer(transfer)
        self.swarm.unregister(self._name(host))
        self._fetches[host] += 1
        self._incoming_counts[host] = 0
        self._asking.discard(host)
        self._missing[host] = {f"d{i}" for i in range(self.chunks)}
        self._register(host, sorted(self._missing[host]))

    def _handle_event(self, kind: str, host: int, fetch: int, pair: ChunkOrigin | None) -> None:
        if fetch != self._fetches[host]:  # of a fetch that was given up
            return
        if kind == "begins":
            self._register(host, sorted(self._missing[host]))
        elif kind == "next":
            self._begin_next(host)
        elif kind == "asks":
            self._asking.discard(host)
        elif kind == "flows" and pair is not None:
            if self._has_exited(pair.source):
                self.failed_count += 1
                self._incoming_counts[host] -= 1
                self._schedule(self.now + MESSAGE_S / 2, "failed", host, pair)
            else:
                self._running[host, pair.chunk] = float(self.chunk_bytes)
                self._sources[host, pair.chunk] = pair.source
                self._rates = None
            return
        name = self._name(host)
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
        began, room = time.process_time(), STREAMS - self._incoming_counts[host]
        pairs = assign_sources(self.swarm, name, room, self.now)
        self.tracker_s += time.process_time() - began
        self.requests += 1
        for pair in pairs:
            assert pair.source != f"node{host}" and pair.chunk in self._missing[host]
            assert pair.source == SOURCE or pair.source in self.swarm.holders[pair.chunk]
            self._incoming_counts[host] += 1
            self._schedule(self.now + MESSAGE_S / 2, "flows", host, pair)
        if self._incoming_counts[host] < STREAMS and host not in self._asking:
            self._asking.add(host)
            self._schedule(self.now + compute_retry_s(self.swarm), "asks", host)
