"""Tracker that assigns sources of chunks while hosts fetch versions and relay them.

The store sends a chunk that no host has to a relaying host, so it sends each chunk about once. From
then on hosts get the chunk from each other: the rarest chunk first, as in BitTorrent (Legout et
al., IMC 2006), from the source with the fewest uploads. The tracker is central, so no request is in
vain. A host that is slow or does not relay gets chunks that others already have, and delays none.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshrl.common.api.weights import ChunkOrigin, SourceAssignments, SourceRequest
from meshrl.common.base.clock import Clock

LATE_FACTOR = 4.0  # times the typical duration, then a transfer is not relied on
MIN_LATE_S = 0.5  # minimum duration of a late transfer
DOWNLOADER_TIMEOUT_S = 5.0  # without a message: a fetching process reports every second
DOUBT_DURATION_S = 5.0  # after a failed transfer, for the host that reported it
MAX_DOUBTING_HOSTS = 2  # with failed transfers from a source, then it gets no requests
HOLDER_MAX_AGE_S = 3600.0  # hosts drop chunks that are unused for that long
RECENT_TRANSFERS = 64  # chunks that define the typical duration
RECENT_TRANSFERS_PER_HOST = 4  # of one host: it is slow if each of them took long
MAX_SOURCE_COPIES = 2  # of a chunk sent by the source while relaying hosts have it
MAX_UPLOADS_PER_HOST = 3  # at once by a host: several transfers hide the pauses of one
MAX_SOURCE_UPLOADS = 4  # by the source, which every host needs
MAX_SOLE_UPLOADS = 16  # if only one host fetches: several streams fill a long link
MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.1  # between two requests of a process without work
MAX_EXAMINED_CHUNKS = 512  # missing chunks among which the next one is chosen
SECONDARY_RANK = 1 << 20  # rank of the source's copy of a chunk that hosts have: last
OfferRank = tuple[int, int]  # the smallest one is first
CLEANUP_INTERVAL_S = 1.0  # between removals of expired state


@dataclass(frozen=True)
class ChunkTransfer:
    source: str
    started_at: float


@dataclass
class Downloader:
    """Process that fetches; `server` serves its host's chunks, empty if no process does."""

    host: str
    server: str
    missing: dict[str, None]
    seen_at: float
    transfers: dict[str, ChunkTransfer] = field(default_factory=dict)  # by chunk
    last_chunk_at: float = 0.0  # when the last chunk arrived
    durations_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=RECENT_TRANSFERS_PER_HOST)
    )  # seconds per chunk


class ChunkSwarm:
    """Processes that fetch chunks of one source; `now` is in seconds of one clock everywhere."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.downloaders: dict[str, Downloader] = {}
        self.holders: dict[str, dict[str, None]] = {}  # servers by chunk
        self.source_copies: dict[str, int] = {}  # sent by the source or on their way
        self._doubted_until: dict[str, dict[str, float]] = {}  # expiry by source and host
        self._touched_at: dict[str, float] = {}  # by chunk, the most recently used last
        self._durations_s: deque[float] = deque(maxlen=RECENT_TRANSFERS)  # seconds per chunk
        self._durations_by_source_s: dict[str, deque[float]] = {}  # seconds per chunk

    # ------------------------------------------------------------ reports of processes

    def register(
        self, name: str, host: str, server: str, missing: Iterable[str], now: float
    ) -> None:
        """Register a process that starts to fetch, or again after the store has forgotten it."""
        # Each host starts with a different one of equally rare chunks.
        order = sorted(missing, key=lambda chunk: zlib.crc32(f"{host} {chunk}".encode()))
        self.downloaders[name] = Downloader(host, server, dict.fromkeys(order), now)

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

    # ------------------------------------------------------------ assignments

    @property
    def typical_s(self) -> float:
        """Median seconds of the last transfers; infinite before the first."""
        return statistics.median(self._durations_s) if self._durations_s else math.inf

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
        oldest = min((way.started_at for way in downloader.transfers.values()), default=now)
        waits_s = now - max(oldest, downloader.last_chunk_at)
        return max(waits_s, min(downloader.durations_s, default=0.0)) > self.late_after_s

    def find_slow_sources(self, now: float) -> set[str]:
        """Return hosts from which, or to which, chunks take much longer than elsewhere."""
        late_s = self.late_after_s
        found = {
            source for source, took in self._durations_by_source_s.items() if min(took) > late_s
        }
        return found | {s.server for s in self.downloaders.values() if self.is_slow(s, now)}

    def is_doubted(self, source: str, host: str, now: float) -> bool:
        """Return True if transfers from a source to the host, or to several hosts, failed
        recently.
        """
        doubts = self._doubted_until.get(source, {})
        doubters = sum(until > now for until in doubts.values())
        return doubts.get(host, 0.0) > now or (
            source != self.source and doubters >= MAX_DOUBTING_HOSTS
        )


def assign_sources(swarm: ChunkSwarm, name: str, max_chunks: int, now: float) -> list[ChunkOrigin]:
    """Return up to `max_chunks` assignments to a process, and record them as started."""
    found: list[ChunkOrigin] = []
    while len(found) < max_chunks:
        there = _SwarmTraffic(swarm, swarm.downloaders[name], now)
        offers = [o for chunk in there.iter_missing() if (o := there.make_offer(chunk)) is not None]
        if not offers:
            break
        _, pair = min(offers, key=lambda offer: offer[0])
        swarm.start_transfer(name, pair.chunk, pair.source, now)
        found.append(pair)
    return found


def compute_retry_s(swarm: ChunkSwarm) -> float:
    """Return the seconds until a process without work asks again: short compared to a transfer."""
    return min(max(swarm.typical_s / 4, MIN_RETRY_S), MAX_RETRY_S)


class _SwarmTraffic:
    def __init__(self, swarm: ChunkSwarm, downloader: Downloader, now: float) -> None:
        self._swarm, self._downloader, self._now = swarm, downloader, now
        self._transfers_by_source: Counter[str] = Counter()  # transfers by source
        self._transfers_to_host: Counter[str] = Counter()  # transfers to this host by source
        self._relayed_transfers: Counter[str] = Counter()  # by chunk, to relaying hosts
        self._incoming_to_host: set[str] = set()  # chunks on the way to this host
        late_s, held_up_s = swarm.late_after_s, swarm.blocks_source_s
        self._slow_sources = swarm.find_slow_sources(now)
        self._relays = {
            name: bool(one.server) and one.server not in self._slow_sources
            for name, one in swarm.downloaders.items()
        }
        self._is_relay = bool(downloader.server) and downloader.server not in self._slow_sources
        for name, one in swarm.downloaders.items():
            near = one.host == downloader.host
            for chunk, way in one.transfers.items():
                if near:
                    self._incoming_to_host.add(chunk)
                    self._transfers_to_host[way.source] += 1
                self._transfers_by_source[way.source] += now - way.started_at <= held_up_s
                self._relayed_transfers[chunk] += (
                    now - way.started_at <= late_s and self._relays[name]
                )
        self._is_only_host = all(
            s.host == downloader.host or not s.missing for s in swarm.downloaders.values()
        )

    def iter_missing(self) -> Iterator[str]:
        """Yield chunks that the process is missing and that are not on the way to its host."""
        looked_at = 0
        for chunk in self._downloader.missing:
            if chunk not in self._incoming_to_host:
                yield chunk
                looked_at += 1
                if looked_at == MAX_EXAMINED_CHUNKS:
                    return

    def make_offer(self, chunk: str) -> tuple[OfferRank, ChunkOrigin] | None:
        """Return the best source of a chunk for the process and the rank of that offer; None if
        none.
        """
        swarm, seeker = self._swarm, self._downloader
        peers = [
            peer
            for peer in swarm.holders.get(chunk, ())
            if peer != seeker.server
            and peer not in self._slow_sources
            and not swarm.is_doubted(peer, seeker.host, self._now)
        ]
        rarity = len(peers) + self._relayed_transfers[chunk]
        if free := [peer for peer in peers if self._has_upload_slot(peer)]:
            peer = min(free, key=self._transfers_by_source.__getitem__)
            return (1 + self._transfers_by_source[peer], rarity), ChunkOrigin(chunk, peer)
        source = swarm.source
        doubted = bool(peers) and swarm.is_doubted(source, seeker.host, self._now)
        if rarity:
            may_leave = self._is_relay and swarm.source_copies.get(chunk, 0) < MAX_SOURCE_COPIES
        else:  # a relaying host that is missing it gets it first
            may_leave = self._is_relay or not any(
                self._relays[name] and chunk in one.missing
                for name, one in swarm.downloaders.items()
            )
        if doubted or not may_leave or not self._has_upload_slot(source):
            return None
        return (SECONDARY_RANK if rarity else 0, rarity), ChunkOrigin(chunk, source)

    def _has_upload_slot(self, source: str) -> bool:
        """Return True if a source may send one more chunk to this host."""
        if self._is_only_host:
            return self._transfers_by_source[source] < MAX_SOLE_UPLOADS
        most = MAX_SOURCE_UPLOADS if source == self._swarm.source else MAX_UPLOADS_PER_HOST
        return self._transfers_by_source[source] < most and not self._transfers_to_host[source]


class ChunkTracker:
    def __init__(self, clock: Clock, source: str) -> None:
        self._clock, self._swarm = clock, ChunkSwarm(source)
        self._cleaned_up_at = 0.0

    def assign_sources(self, request: SourceRequest) -> SourceAssignments:
        swarm, now = self._swarm, self._clock.monotonic()
        if now - self._cleaned_up_at > CLEANUP_INTERVAL_S:
            self._cleaned_up_at = now
            swarm.forget_expired(now)
        if request.missing is not None:
            swarm.register(
                request.fetch_id, request.host, request.serving_process, request.missing, now
            )
        if not swarm.touch_downloader(request.fetch_id, now):
            return SourceAssignments([], compute_retry_s(swarm), is_known=request.is_last)
        swarm.add_holder(request.fetch_id, request.present, now)
        for failed in request.failed:
            swarm.fail_transfer(
                request.fetch_id, failed.chunk, failed.source, failed.source_lacks_chunk, now
            )
        if request.is_last:
            swarm.unregister(request.fetch_id)
            return SourceAssignments([], compute_retry_s(swarm))
        return SourceAssignments(
            assign_sources(swarm, request.fetch_id, request.max_chunks, now), compute_retry_s(swarm)
        )

    def stats(self) -> dict[str, int]:
        return {"seeking": len(self._swarm.downloaders), "relayed": len(self._swarm.holders)}
