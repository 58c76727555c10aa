"""Tracker that assigns sources of chunks while hosts fetch versions and relay them.

The store sends a chunk that no host has to a relaying host, so it sends each chunk about once. From
then on hosts get the chunk from each other: the rarest chunk first, as in BitTorrent (Legout et
al., IMC 2006), from the source with the fewest uploads. The tracker is central, so no request is in
vain. A host that is slow or does not relay gets chunks that others already have, and delays none.

A chunk enters each other network about once, and spreads from host to host there. Updates come
before first versions: until they have arrived, processes without a version have a share of each
source's uploads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshrl.common.api.weights import ChunkOrigin, SourceAssignments, SourceRequest
from meshrl.common.base.clock import Clock
from meshrl.services.weights.chunk_swarm import ChunkSwarm, Downloader

MAX_SOURCE_COPIES = 2  # of a chunk sent by the source while relaying hosts have it
MAX_UPLOADS_PER_HOST = 3  # at once by a host: several transfers hide the pauses of one
MAX_SOURCE_UPLOADS = 4  # by the source, which every host needs
MAX_JOINER_UPLOADS = 1  # of these, to processes without a version while others update
MAX_SOLE_UPLOADS = 16  # if only one host fetches: several streams fill a long link
MIN_RETRY_S, MAX_RETRY_S = 0.01, 0.1  # between two requests of a process without work
MAX_EXAMINED_CHUNKS = 512  # missing chunks among which the next one is chosen
SECONDARY_RANK = 1 << 20  # rank of the source's copy of a chunk that hosts have: last
OfferRank = tuple[int, int]  # the smallest one is first
CLEANUP_INTERVAL_S = 1.0  # between removals of expired state


def assign_sources(swarm: ChunkSwarm, name: str, max_chunks: int, now: float) -> list[ChunkOrigin]:
    """Return up to `max_chunks` assignments to a process, and record them as started."""
    found: list[ChunkOrigin] = []
    if max_chunks <= 0 or not swarm.downloaders[name].missing:
        return found
    traffic = _SwarmTraffic(swarm, swarm.downloaders[name], now)
    while len(found) < max_chunks:
        offers = [
            offer
            for chunk in traffic.iter_missing()
            if (offer := traffic.make_offer(chunk)) is not None
        ]
        if not offers:
            break
        _, pair = min(offers, key=lambda offer: offer[0])
        swarm.start_transfer(name, pair.chunk, pair.source, now)
        traffic.add_transfer(pair)
        found.append(pair)
    return found


def compute_retry_s(swarm: ChunkSwarm) -> float:
    """Return the seconds until a process without work asks again: short compared to a transfer."""
    return min(max(swarm.typical_s / 4, MIN_RETRY_S), MAX_RETRY_S)


class _SwarmTraffic:
    """Transfers of a swarm at one time, from the point of view of one process."""

    def __init__(self, swarm: ChunkSwarm, downloader: Downloader, now: float) -> None:
        self._swarm, self._downloader, self._now = swarm, downloader, now
        self._transfers_by_source: Counter[str] = Counter()
        self._joiner_transfers: Counter[str] = Counter()  # of these, to processes that join
        self._sources_to_host: set[str] = set()  # that send to this host
        self._relayed_transfers: Counter[str] = Counter()  # by chunk, to relaying hosts
        self._near_transfers: Counter[str] = Counter()  # of these, to hosts of this network
        self._incoming_to_host: set[str] = set()  # chunks on the way to this host
        late_s, held_up_s = swarm.late_after_s, swarm.blocks_source_s
        self._slow_sources = swarm.find_slow_sources(now)
        self._is_relay = self._relays(downloader)
        self._is_only_host, self._others_update = True, False
        for one in swarm.downloaders.values():
            is_here = one.host == downloader.host
            if one.missing and not is_here:
                self._is_only_host = False
                if not one.is_joining and one.server not in self._slow_sources:
                    self._others_update = True
            relays = self._relays(one)
            for chunk, way in one.transfers.items():
                lasts_s = now - way.started_at
                if is_here:
                    self._incoming_to_host.add(chunk)
                    self._sources_to_host.add(way.source)
                if lasts_s <= held_up_s:
                    self._transfers_by_source[way.source] += 1
                    self._joiner_transfers[way.source] += one.is_joining
                if relays and lasts_s <= late_s:
                    self._relayed_transfers[chunk] += 1
                    self._near_transfers[chunk] += one.network == downloader.network
        self._unusable = {
            downloader.server,
            *self._slow_sources,
            *swarm.list_doubted(downloader.host, now),
        }
        self._usable = swarm.servers.keys() - self._unusable
        self._far_servers = {
            name for name in self._usable if swarm.servers[name].network != downloader.network
        }
        self._is_source_near = swarm.network == downloader.network
        self._is_source_doubted = swarm.is_doubted(swarm.source, downloader.host, now)
        self._update_free_servers()

    def _relays(self, downloader: Downloader) -> bool:
        return bool(downloader.server) and downloader.server not in self._slow_sources

    def _update_free_servers(self) -> None:
        """Find the hosts that may send one more chunk to this host."""
        busy = {source for source in self._transfers_by_source if not self._has_slot(source)}
        if not self._is_only_host:
            busy |= self._sources_to_host
        self._free_servers = self._usable - busy
        self._is_source_free = self._swarm.source not in busy

    def _has_slot(self, source: str) -> bool:
        """Return True if a source may send one more chunk to a process like this one."""
        count, to_joiners = self._transfers_by_source[source], self._joiner_transfers[source]
        if self._is_only_host:
            return count < MAX_SOLE_UPLOADS
        most = MAX_SOURCE_UPLOADS if source == self._swarm.source else MAX_UPLOADS_PER_HOST
        if not self._downloader.is_joining:
            return count - to_joiners < most
        server = self._swarm.servers.get(source)
        if self._others_update and not (server is not None and server.is_joining):
            most = MAX_JOINER_UPLOADS
        return to_joiners < most and count < MAX_SOLE_UPLOADS

    def add_transfer(self, pair: ChunkOrigin) -> None:
        """Record a transfer to this process that has just started."""
        self._incoming_to_host.add(pair.chunk)
        self._sources_to_host.add(pair.source)
        self._transfers_by_source[pair.source] += 1
        self._joiner_transfers[pair.source] += self._downloader.is_joining
        self._update_free_servers()

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

        Hosts of its network come first. While one of them has the chunk or receives it, no other
        network sends it.
        """
        swarm, source, transfers = self._swarm, self._swarm.source, self._transfers_by_source
        holders = swarm.holders.get(chunk, {}).keys()
        peers = len(holders) - len(holders & self._unusable)
        rarity = peers + self._relayed_transfers[chunk]
        near = peers - len(holders & self._far_servers) + self._near_transfers[chunk]
        source_sends = self._is_source_free and not (peers and self._is_source_doubted)
        may_cross = not near or self._is_source_near
        if free := self._free_servers & holders:
            if closest := free - self._far_servers:
                free = closest
            elif near:
                free = set()
            elif self._is_source_near and source_sends:
                return (1 + transfers[source], near), ChunkOrigin(chunk, source)
        if free:
            peer = min(free, key=lambda one: (transfers[one], one))
            return (1 + transfers[peer], near or rarity), ChunkOrigin(chunk, peer)
        if rarity:
            copies = swarm.source_copies.get(chunk, 0)
            may_leave = self._is_relay and copies < MAX_SOURCE_COPIES and may_cross
        else:  # a relaying host that is missing it gets it first
            may_leave = self._is_relay or not any(
                self._relays(one) and chunk in one.missing for one in swarm.downloaders.values()
            )
        if not may_leave or not source_sends:
            return None
        return (SECONDARY_RANK if rarity else 0, rarity), ChunkOrigin(chunk, source)


class ChunkTracker:
    def __init__(self, clock: Clock, source: str, network: str = "") -> None:
        self._clock, self._swarm = clock, ChunkSwarm(source, network)
        self._cleaned_up_at = 0.0

    def assign_sources(self, request: SourceRequest) -> SourceAssignments:
        swarm, now = self._swarm, self._clock.monotonic()
        if now - self._cleaned_up_at > CLEANUP_INTERVAL_S:
            self._cleaned_up_at = now
            swarm.forget_expired(now)
        if request.missing is not None:
            swarm.register(
                request.fetch_id,
                request.host,
                request.serving_process,
                request.missing,
                now,
                network=request.network,
                is_joining=request.is_joining,
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
