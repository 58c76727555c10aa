"""Host cache of one engine: offloaded keys and values in memory and on disk, shared by the host.

The engine calls it between and within its steps, so no call here waits. The loader's thread finds
requested chunks, and the writer's thread writes offloaded ones.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import ChunkLookup
from meshrl.common.api.stats import KVStats
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import BadMessage
from meshrl.common.generation.engine_contract import IntArray
from meshrl.common.generation.prefix_loading import (
    CHUNK_TOKENS,
    CacheOrigin,
    OffloadedPrefix,
    PrefixLoad,
    PrefixQuery,
)
from meshrl.services.engine.kv.chunk_files import (
    ChunkHeader,
    compute_chunk_names,
    compute_domain,
    is_domain,
)
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.loader import ChunkLoader, ChunkSource, LocalTiers, PrefixRequest
from meshrl.services.engine.kv.offload_policy import OffloadPolicy, TransferRate
from meshrl.services.engine.kv.peers import MIN_TOKENS, TierChunkStore, decode_chunk_names
from meshrl.services.engine.kv.writer import ChunkCopy, ChunkWriter

MAX_SESSIONS = 1 << 14  # sessions with offloaded caches that are remembered


@dataclass(frozen=True)
class _OffloadedSession:
    tokens: IntArray
    domain: str
    names: tuple[str, ...]
    origin: CacheOrigin
    adapter: str


class CachedEngine(Protocol):
    @property
    def cache_layout(self) -> str:
        """Layout of keys and values in copies of the engine's cache."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed in a second; 0: unknown."""

    def offload_all(self) -> None:
        """Offer all cached prefixes for offloading."""


class HostCache:
    """KV tiers of an engine, the nearest first. Policy `keep`: caches of versions other than the
    loaded one are usable.
    """

    def __init__(
        self,
        tiers: Sequence[KVTier],
        clock: Clock,
        engine: CachedEngine,
        policy: str,
        wake: Callable[[], None],
        on_error: Callable[[BaseException], None],
        peers: ChunkSource | None = None,
    ) -> None:
        """Initialize the cache.

        `wake` is called when chunks have arrived; `on_error` receives unexpected errors; `peers`
        provide chunks of other hosts.
        """
        self.offload_all = engine.offload_all
        self._tiers, self._clock, self._engine = tiers, clock, engine
        self._layout, self._policy = engine.cache_layout, policy
        self._bytes_per_token = engine.cache_bytes_per_token
        self._weights = ""  # manifest of the engine's weights; empty: unknown
        self._domain_locks: list[int] = []
        self._sessions: OrderedDict[int, _OffloadedSession] = OrderedDict()
        self._pending_names: set[str] = set()  # chunks that are queued for writing
        self._loads: list[PrefixLoad] = []
        self._offload_policies = {"session": OffloadPolicy(), "prefix": OffloadPolicy()}
        self._copy_rate = TransferRate()  # of copies out, during which the engine is paused
        self.requested_tokens = 0  # tokens of requested prefixes
        self.recomputed_tokens = 0  # tokens that were computed although they were offloaded
        self.loaded_tokens: Counter[str] = Counter()  # loaded tokens by tier
        self.loaded_bytes: Counter[str] = Counter()  # bytes of the loaded tokens
        self.saved_s = 0.0  # time that computing the loaded tokens would have taken
        about = clock, wake, self._count_loaded, on_error
        self._peer_loader = None if peers is None else ChunkLoader(peers, *about)
        self._local_tiers = LocalTiers(tiers, clock)
        self.loader = ChunkLoader(self._local_tiers, *about, on_missing=self._request_from_peers)
        done = self._pending_names.discard
        self.writer = ChunkWriter(tiers, clock, self._load_s_per_byte, done, on_error)

    def _load_s_per_byte(self, tier: KVTier) -> float:
        return self.loader.get_rate(tier.name).s_per_byte

    def _request_from_peers(self, request: PrefixRequest) -> None:
        """Request chunks that this host lacks from other hosts, if they are many."""
        if (
            self._peer_loader is not None
            and len(request.compute_names()) * CHUNK_TOKENS >= MIN_TOKENS
        ):
            self._peer_loader.add(request)

    def close(self) -> None:
        self.loader.close()
        if self._peer_loader is not None:
            self._peer_loader.close()
        self.writer.close()
        for descriptor in self._domain_locks:
            os.close(descriptor)
        self._domain_locks = []
        for shelf in self._tiers:
            shelf.close()

    def set_weights(self, manifest: str, adapters: Sequence[str] = ()) -> None:
        """Set the weights that the engine computes with; an empty manifest means unnamed weights.

        Chunks of other weights are removed once no engine can use them.
        """
        if manifest == self._weights:
            return
        self._weights = manifest
        domains = [self._compute_domain(adapter) for adapter in ("", *adapters)] if manifest else []
        if self._policy == "recompute":
            self.release_sessions(list(self._sessions))
        self.writer.submit(partial(self._swap_domain_locks, domains))

    def _swap_domain_locks(self, domains: Sequence[str]) -> None:
        domain_locks = [shelf.lock_domain(domain) for shelf in self._tiers for domain in domains]
        before, self._domain_locks = (
            self._domain_locks,
            [one for one in domain_locks if one is not None],
        )
        for descriptor in before:
            os.close(descriptor)
        for shelf in self._tiers:
            shelf.remove_unusable()

    def _compute_domain(self, adapter: str) -> str:
        return compute_domain(self._weights, adapter, self._layout, self._policy)

    # -- lookups ---------------------------------------------------------------------------------

    def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
        """Request a prefix and return what may arrive of it; None if there is none."""
        if not self._weights:
            return None
        now_s, n = self._clock.monotonic(), len(query.tokens)
        self.requested_tokens += n - query.num_computed_tokens
        session = self._find_session(query)
        domain = self._compute_domain(query.adapter)
        # computed with earlier weights, or with several versions
        if session is not None and session.domain != domain:
            load = self._load_stale_session(query, session, now_s)
            if load is not None:
                return load
            session = None
        origin = session.origin if session is not None else None
        load = PrefixLoad(
            query.num_computed_tokens, (n - 1) // CHUNK_TOKENS * CHUNK_TOKENS, now_s, origin=origin
        )
        self._loads.append(load)
        tokens = query.tokens[: n - 1]
        if any(
            self._has_chunk(domain, name)
            for name in compute_chunk_names(domain, tokens[:CHUNK_TOKENS])
        ):
            load.expected_chunk_s = (
                CHUNK_TOKENS * self._bytes_per_token * self._load_s_per_byte(self._tiers[0])
            )
        self.loader.add(
            PrefixRequest(load, domain, lambda: index_by_start(compute_chunk_names(domain, tokens)))
        )
        return load

    def _find_session(self, query: PrefixQuery) -> _OffloadedSession | None:
        """Find the chunks of the request's own session, if it continues from there."""
        found = self._sessions.get(query.session)
        if found is None or found.adapter != query.adapter:
            return None
        n = len(found.tokens)
        goes_on = n < len(query.tokens) and bool((query.tokens[:n] == found.tokens).all())
        return found if goes_on else None

    def _load_stale_session(
        self, query: PrefixQuery, session: _OffloadedSession, now_s: float
    ) -> PrefixLoad | None:
        """Load a cache of earlier weights if it is usable and loads faster than it computes."""
        n, origin = len(session.tokens), session.origin
        if self._policy != "keep" or query.num_computed_tokens or origin.first_sampled_index >= n:
            return None
        rate = self._engine.prefill_tokens_per_s
        per_byte = max(map(self._load_s_per_byte, self._tiers))
        if rate and per_byte * self._bytes_per_token > 1 / rate:
            return None
        load = PrefixLoad(0, n, now_s, origin=origin, is_front_first=True)
        self._loads.append(load)
        self.loader.add(PrefixRequest(load, session.domain, lambda: index_by_start(session.names)))
        return load

    def _count_loaded(self, tier: str, header: ChunkHeader, size: int) -> None:
        tokens = header.tokens
        self.loaded_tokens[tier] += tokens
        self.loaded_bytes[tier] += size
        self._offload_policies["session" if header.session_tag else "prefix"].count_reuse()
        rate = self._engine.prefill_tokens_per_s
        self.saved_s += tokens / rate if rate else 0.0

    # -- offloading ------------------------------------------------------------------------------

    def offload(self, prefix: OffloadedPrefix) -> None:
        """Copy out the chunks that are worth it, the last ones first, within the engine's pause
        limit.

        A cache of several weight versions belongs to its session alone and is only useful as a
        whole.
        """
        if not self._weights or not (
            prefix.is_single_version or (prefix.is_evicted and self._policy == "keep")
        ):
            return
        n = len(prefix.tokens)
        if not prefix.is_single_version and (
            prefix.session < 0 or prefix.origin.first_sampled_index >= n
        ):
            return  # no engine could use it
        domain = (
            self._compute_domain(prefix.adapter)
            if prefix.is_single_version
            else os.urandom(16).hex()
        )
        own = prefix.is_evicted and prefix.session >= 0
        # a cache that outlives its weights is only useful as a whole
        names = compute_chunk_names(domain, prefix.tokens, include_partial=own)
        tag = prefix.session + 1 if own else 0
        copied = self._copy_chunks(prefix, domain, names, tag)
        if own and (copied or prefix.is_single_version):
            self._record_session(prefix, domain, names, tag)

    def _copy_chunks(
        self, prefix: OffloadedPrefix, domain: str, names: Sequence[str], tag: int
    ) -> bool:
        """Copy the chunks that are worth it; return True if all are stored or about to be."""
        clock, n = self._clock, len(prefix.tokens)
        began = clock.monotonic()
        worth = self._offload_policies["session" if prefix.is_evicted else "prefix"]
        rate = self._engine.prefill_tokens_per_s
        for index in reversed(range(len(names))):
            name, start = names[index], index * CHUNK_TOKENS
            end = min(start + CHUNK_TOKENS, n)
            if name in self._pending_names or self._has_chunk(domain, name):
                continue
            size = (end - start) * self._bytes_per_token
            saved_s = (end - start) / rate if rate else 0.0
            left_s = began + prefix.copy_budget_s - clock.monotonic()
            if left_s <= 0 or not self.writer.wait_for_room(size, left_s):
                self.writer.dropped_chunks += index + 1
                return False
            if prefix.is_single_version and not worth.is_worthwhile(
                saved_s, size * self._copy_rate.s_per_byte
            ):
                continue
            at = clock.monotonic()
            content = np.ascontiguousarray(prefix.read(start, end))
            self._copy_rate.add(content.nbytes, clock.monotonic() - at)
            worth.count_offload()
            self._pending_names.add(name)
            self.writer.add(
                ChunkCopy(domain, name, ChunkHeader(start, end - start, saved_s, tag), content)
            )
        return True

    def _has_chunk(self, domain: str, name: str) -> bool:
        return any(shelf.files.has(domain, name) for shelf in self._tiers)

    def _record_session(
        self, prefix: OffloadedPrefix, domain: str, names: Sequence[str], tag: int
    ) -> None:
        before = self._sessions.pop(prefix.session, None)
        self._sessions[prefix.session] = _OffloadedSession(
            prefix.tokens, domain, tuple(names), prefix.origin, prefix.adapter
        )
        stays = frozenset(names) if before is not None and before.domain == domain else frozenset()
        old = [name for name in before.names if name not in stays] if before is not None else []

        def note() -> None:
            for shelf in self._tiers:
                shelf.mark_resumable(tag)
                if before is not None:
                    shelf.remove_session_chunks(before.domain, old, tag)

        self.writer.submit(note)
        if len(self._sessions) > MAX_SESSIONS:
            self._drop_session(next(iter(self._sessions)))

    def release_sessions(self, sessions: Sequence[int]) -> None:
        """Release the chunks that belong to these ended sessions alone."""
        for session in sessions:
            self._drop_session(session)

    def _drop_session(self, session: int) -> None:
        found = self._sessions.pop(session, None)
        if found is None:
            return

        def forget() -> None:
            for shelf in self._tiers:
                shelf.unmark_resumable(session + 1)
                shelf.remove_session_chunks(found.domain, found.names, session + 1)

        self.writer.submit(forget)

    @property
    def chunk_store(self) -> TierChunkStore:
        return TierChunkStore(self._tiers)

    def look_up_chunks(self, request: ChunkLookup) -> NDArray[np.bool_]:
        """Return which of the chunks are on the tiers, bool [n], and reserve them for a while."""
        names = decode_chunk_names(request)
        if not is_domain(request.domain):
            raise BadMessage(f"{request.domain!r:.60} does not name weights")
        there = set(self._local_tiers.look_up(request.domain, dict(enumerate(names))))
        return np.array([index in there for index in range(len(names))], np.bool_)

    def stats(self) -> KVStats:
        for load in [load for load in self._loads if load.is_cancelled]:
            self._loads.remove(load)
            self.recomputed_tokens += max(0, load.num_available - load.num_skipped)
        errors = [*(shelf.last_error for shelf in self._tiers), self.writer.last_error]
        return KVStats(
            recomputed_tokens=self.recomputed_tokens,
            loaded_tokens=dict(self.loaded_tokens),
            bytes_in=dict(self.loaded_bytes),
            bytes_out=dict(self.writer.written_bytes),
            lookup_tokens=self.requested_tokens,
            dropped_chunks=self.writer.dropped_chunks,
            saved_s=round(self.saved_s, 3),
            used_bytes={shelf.name: shelf.used_bytes for shelf in self._tiers},
            rejection_reasons=[error for error in errors if error],
        )


def index_by_start(names: Sequence[str]) -> dict[int, str]:
    return {index * CHUNK_TOKENS: name for index, name in enumerate(names)}
