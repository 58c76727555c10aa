"""Processes that fetch chunks of the weight store, hosts that have them, and their transfers."""

from __future__ import annotations

import math
import statistics
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LATE_FACTOR = 4.0  # times the typical duration, then a transfer is not relied on
MIN_LATE_S = 0.5  # minimum duration of a late transfer
DOWNLOADER_TIMEOUT_S = 5.0  # without a message: a fetching process reports every second
DOUBT_DURATION_S = 5.0  # after a failed transfer, for the host that reported it
MAX_DOUBTING_HOSTS = 2  # with failed transfers from a source, then it gets no requests
HOLDER_MAX_AGE_S = 3600.0  # hosts drop chunks that are unused for that long
SLOW_CHECK_S = 0.02  # between two checks for slow hosts
RECENT_TRANSFERS = 64  # chunks that define the typical duration
RECENT_TRANSFERS_PER_HOST = 4  # of one host: it is slow if each of them took long


@dataclass(frozen=True)
class ChunkTransfer:
    source: str
    started_at: float


@dataclass(frozen=True)
class Server:
    """Process that serves the chunks of its host."""

    network: str  # name of the host's network; empty: the head's
    is_joining: bool  # its host joins
    seen_at: float  # when a process of its host fetched last


@dataclass
class Downloader:
    """Process that fetches; `server` serves its host's chunks, empty if no process does."""

    host: str
    server: str
    missing: dict[str, None]
    seen_at: float
    network: str = ""
    is_joining: bool = False  # it has no version yet
    transfers: dict[str, ChunkTransfer] = field(default_factory=dict)  # by chunk
    last_chunk_at: float = 0.0  # when the last chunk arrived
    durations_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=RECENT_TRANSFERS_PER_HOST)
    )  # seconds per chunk


class ChunkSwarm:
    """Processes that fetch chunks of one source; `now` is in seconds of one clock everywhere."""

    def __init__(self, source: str, network: str = "") -> None:
        """Create the swarm of a source, which is in a network of hosts."""
        self.source, self.network = source, network
        self.downloaders: dict[str, Downloader] = {}
        self.servers: dict[str, Server] = {}  # that relay chunks, by name
        self.holders: dict[str, dict[str, None]] = {}  # servers by chunk
        self.source_copies: dict[str, int] = {}  # sent by the source or on their way
        self._doubted_until: dict[str, dict[str, float]] = {}  # expiry by source and host
        self._touched_at: dict[str, float] = {}  # by chunk, the most recently used last
        self._durations_s: deque[float] = deque(maxlen=RECENT_TRANSFERS)  # seconds per chunk
        self._durations_by_source_s: dict[str, deque[float]] = {}  # seconds per chunk
        self._slow_at, self._slow_sources = -math.inf, set[str]()  # the last check
        self.typical_s = math.inf  # median seconds of the last transfers; infinite before the first

    # ------------------------------------------------------------ reports of processes

    def register(
        self,
        name: str,
        host: str,
        server: str,
        missing: Iterable[str],
        now: float,
        *,
        network: str = "",
        is_joining: bool = False,
    ) -> None:
        """Register a process that starts to fetch, or again after the store has forgotten it.

        `network` is that of its host. `is_joining`: it has no version yet, so it updates none.
        """
        # Each host starts with a different one of equally rare chunks.
        order = sorted(missing, key=lambda chunk: zlib.crc32(f"{host} {chunk}".encode()))
        missing_chunks = dict.fromkeys(order)
        self.downloaders[name] = Downloader(host, server, missing_chunks, now, network, is_joining)
        if server:
            self.servers[server] = Server(network, is_joining, now)

    def touch_downloader(self, name: str, now: float) -> bool:
        """Record a sign of life; False if the process is not registered."""
        if (seeker := self.downloaders.get(name)) is not None:
            seeker.seen_at = now
        return seeker is not None

    def add_holder(self, name: str, chunks: Iterable[str], now: float) -> None:
        """Record chunks on the host of a process, whichever process fetched them."""
        seeker = self.downloaders[name]
        near = [one for one in self.downloaders.values() if one.host == seeker.host]
        for chunk in chunks:
            for one in near:
                one.missing.pop(chunk, None)
            if (way := seeker.transfers.pop(chunk, None)) is not None:
                seeker.last_chunk_at = now
                sent = self._durations_by_source_s.setdefault(
                    way.source, deque(maxlen=RECENT_TRANSFERS_PER_HOST)
                )
                for took in (self._durations_s, seeker.durations_s, sent):
                    took.append(now - way.started_at)
                self.typical_s = statistics.median(self._durations_s)
            if seeker.server:
                self.holders.setdefault(chunk, {})[seeker.server] = None
            self._touch_chunk(chunk, now)

    def start_transfer(self, name: str, chunk: str, source: str, now: float) -> None:
        self.downloaders[name].transfers[chunk] = ChunkTransfer(source, now)
        if source == self.source:
            self.source_copies[chunk] = self.source_copies.get(chunk, 0) + 1
        self._touch_chunk(chunk, now)

    def fail_transfer(self, name: str, chunk: str, source: str, is_gone: bool, now: float) -> None:
        """Record a failed transfer. `is_gone`: the source does not have a valid chunk."""
        seeker = self.downloaders[name]
        seeker.transfers.pop(chunk, None)
        if is_gone:
            self.holders.get(chunk, {}).pop(source, None)
        else:
            self._doubted_until.setdefault(source, {})[seeker.host] = now + DOUBT_DURATION_S

    def unregister(self, name: str) -> None:
        self.downloaders.pop(name, None)

    def forget_expired(self, now: float) -> None:
        """Forget silent processes, and chunks that hosts have dropped since."""
        for name in [
            n for n, s in self.downloaders.items() if now - s.seen_at > DOWNLOADER_TIMEOUT_S
        ]:
            self.unregister(name)
        for source, by_host in list(self._doubted_until.items()):
            if all(until <= now for until in by_host.values()):
                del self._doubted_until[source]
        for seeker in self.downloaders.values():
            if seeker.server:
                self.servers[seeker.server] = Server(seeker.network, seeker.is_joining, now)
        for server in [
            name for name, one in self.servers.items() if now - one.seen_at > HOLDER_MAX_AGE_S
        ]:
            del self.servers[server]
            for by_server in self.holders.values():
                by_server.pop(server, None)
        servers = {s.server for s in self.downloaders.values()} | {self.source}
        self._durations_by_source_s = {
            s: took for s, took in self._durations_by_source_s.items() if s in servers
        }
        for chunk, at in list(self._touched_at.items()):
            if now - at <= HOLDER_MAX_AGE_S:
                break
            for known in (self._touched_at, self.holders, self.source_copies):
                known.pop(chunk, None)

    def _touch_chunk(self, chunk: str, now: float) -> None:
        self._touched_at.pop(chunk, None)
        self._touched_at[chunk] = now

    # ------------------------------------------------------------ slow and failed sources

    @property
    def late_after_s(self) -> float:
        """Seconds after which a transfer counts as late."""
        return max(MIN_LATE_S, LATE_FACTOR * self.typical_s)

    @property
    def blocks_source_s(self) -> float:
        """Seconds for which a transfer occupies its source.

        Before the first transfer ends, no process is known to be slow, so the minimum applies.
        """
        return self.late_after_s if self._durations_s else MIN_LATE_S

    def is_slow(self, downloader: Downloader, now: float) -> bool:
        """Return True if chunks take much longer to this process than to others."""
        late_s = self.late_after_s
        oldest = min((way.started_at for way in downloader.transfers.values()), default=now)
        return now - max(oldest, downloader.last_chunk_at) > late_s or (
            min(downloader.durations_s, default=0.0) > late_s
        )

    def find_slow_sources(self, now: float) -> set[str]:
        """Return hosts from which, or to which, chunks take much longer than elsewhere.

        They are at most SLOW_CHECK_S old, because a hundred hosts make thousands of requests.
        """
        if not 0 <= now - self._slow_at <= SLOW_CHECK_S:
            self._slow_at, self._slow_sources = now, self._compute_slow_sources(now)
        return self._slow_sources

    def _compute_slow_sources(self, now: float) -> set[str]:
        late_s = self.late_after_s
        found = {
            source for source, took in self._durations_by_source_s.items() if min(took) > late_s
        }
        return found | {s.server for s in self.downloaders.values() if self.is_slow(s, now)}

    def list_doubted(self, host: str, now: float) -> list[str]:
        """Return the sources that the host must not use, as failed transfers from them show."""
        return [source for source in self._doubted_until if self.is_doubted(source, host, now)]

    def is_doubted(self, source: str, host: str, now: float) -> bool:
        """Return True if transfers from a source to the host, or to several hosts, failed
        recently.
        """
        doubts = self._doubted_until.get(source, {})
        doubters = sum(until > now for until in doubts.values())
        return doubts.get(host, 0.0) > now or (
            source != self.source and doubters >= MAX_DOUBTING_HOSTS
        )
