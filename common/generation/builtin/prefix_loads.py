"""Loads of prefixes into an engine's slots, and offers of the slots' caches for offloading.

Chunks are installed between two steps, ahead of the slot's computed tokens and with gaps between
them. The slot skips them when it reaches them.

A token carries the version that sampled it. Tokens of one version must not follow a cache of
another without an earlier token that shows it. So a cache is accepted if the loaded weights
computed all of it. If mixed caches are allowed, it is also accepted if one of its tokens was
sampled under other weights: then the result is as if the session had stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from meshrl.common.base.clock import Clock
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import StepCompute
from meshrl.common.generation.builtin.loaded_weights import LoadedWeights
from meshrl.common.generation.engine_contract import MIXED_VERSIONS, SessionCache
from meshrl.common.generation.prefix_loading import (
    MIN_PREFIX_TOKENS,
    CacheOrigin,
    OffloadedPrefix,
    PrefixLoad,
    PrefixQuery,
    PrefixStore,
)

OTHER_WEIGHTS_ID = -1  # weights id of a cache that the loaded weights did not compute completely
MAX_OFFERED_LOADS = 16  # limit of sessions whose caches arrive before their requests
COPY_BUDGET_S = 0.05  # to copy a slot's cache on eviction, while other slots decode
FINAL_COPY_BUDGET_S = 2.0  # to copy the caches of all slots after the last decode step


class PrefixLoads:
    """Prefix loads of one engine.

    `prefill_slots`: slots that prefill. `allow_mixed_versions`: caches of several versions are
    usable.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        paged_cache: PagedCache,
        clock: Clock,
        prefill_slots: Sequence[int],
        weights: LoadedWeights,
        *,
        allow_mixed_versions: bool,
    ) -> None:
        self.store: PrefixStore | None = None  # store of offloaded caches
        # prefilling slots whose prefix was not searched yet
        self.unsearched_slots: set[int] = set()
        self.active_loads: dict[int, PrefixLoad] = {}  # by slot
        self.offered_loads: dict[int, PrefixLoad] = {}  # by session, before its request arrives
        self._slots, self._compute, self._paged_cache, self._clock = (
            slots,
            compute,
            paged_cache,
            clock,
        )
        self._prefill_slots, self._weights, self._allow_mixed_versions = (
            prefill_slots,
            weights,
            allow_mixed_versions,
        )

    def __contains__(self, slot: int) -> bool:
        return slot in self.active_loads

    def release_sessions(self, sessions: Sequence[int]) -> None:
        """Release the loads of these ended sessions."""
        for session in sessions:
            self.withdraw_offer(session)
        if self.store is not None:
            self.store.release_sessions(sessions)

    def expect_load(self, session: int, load: PrefixLoad) -> None:
        """Expect `load` for the session's next request, or for the one that is being prefilled.

        A call of `offer_load`, or the end of `load`, follows.
        """
        self.withdraw_offer(session)
        slots = self._slots
        running = [slot for slot in slots.list_running_slots() if slots.session_id[slot] == session]
        late = bool(running) and running[0] not in self._prefill_slots
        if session < 0 or late or not self._weights.is_ready:
            load.is_cancelled = True
            return
        self.offered_loads[session] = load
        while len(self.offered_loads) > MAX_OFFERED_LOADS:
            self.withdraw_offer(next(iter(self.offered_loads)))

    def offer_load(self, session: int, cache: SessionCache, load: PrefixLoad) -> bool:
        """Offer the content of `load`, which may be expected already.

        Return False, with the load cancelled, if it must not or cannot be used.
        """
        if load.is_cancelled or not self._is_usable(cache, load):
            load.is_cancelled = True
            return False
        load.session_cache = cache
        load.end = len(cache.tokens)
        slot = next((slot for slot, known in self.active_loads.items() if known is load), None)
        if slot is not None:
            del self.active_loads[slot]
            self._start_load(slot, load)
        elif self.offered_loads.get(session) is not load:
            self.expect_load(session, load)
        return not load.is_cancelled

    def _is_usable(self, cache: SessionCache, load: PrefixLoad) -> bool:
        slots, place = self._slots, self._weights.adapter_indices.get(cache.adapter)
        fits = cache.layout == self._compute.cache_layout and len(cache.tokens) < slots.max_length
        if place is None or not self._weights.is_ready or not fits:
            return False
        version = int(slots.adapter_versions[place])
        if load.is_front_first:
            return self._allow_mixed_versions and has_other_version_sample(cache, version)
        return cache.version == version

    def withdraw_offer(self, session: int) -> None:
        """Withdraw a session's offer and cancel its load."""
        load = self.offered_loads.pop(session, None)
        if load is not None:
            load.is_cancelled = True

    def withdraw_all_offers(self) -> None:
        """Withdraw all offers, because the weights that they assumed have changed."""
        for session in list(self.offered_loads):
            self.withdraw_offer(session)

    def find_load(self, slot: int) -> PrefixLoad | None:
        """Return the load of the slot's prefix.

        It comes from another engine or from a search of the store, of which each slot has one.
        """
        load = self.active_loads.get(slot)
        if load is None:
            load = self.offered_loads.pop(int(self._slots.session_id[slot]), None)
            if load is None and slot in self.unsearched_slots:
                self.unsearched_slots.discard(slot)
                load = self._search_store(slot)
            if load is not None:
                self._start_load(slot, load)
        return self.active_loads.get(slot)

    def _search_store(self, slot: int) -> PrefixLoad | None:
        slots = self._slots
        known, computed = int(slots.num_tokens[slot]), int(slots.num_computed_tokens[slot])
        if self.store is None or known - 1 - computed < MIN_PREFIX_TOKENS:
            return None
        adapter = self._weights.get_adapter_name(int(slots.adapter_index[slot]))
        tokens = slots.tokens[slot, :known].astype(np.int32)
        session = int(slots.session_id[slot])
        return self.store.find_prefix(PrefixQuery(tokens, computed, session, adapter))

    def _start_load(self, slot: int, load: PrefixLoad) -> None:
        """Start a load for a slot, if it extends beyond the slot's computed tokens."""
        slots = self._slots
        computed, known = int(slots.num_computed_tokens[slot]), int(slots.num_tokens[slot])
        pure = not load.is_front_first and slots.cache_weights_id[slot] == slots.get_weights_id(
            slot
        )
        load.claimed_end = computed
        load.end = min(load.end, known - 1)
        fits = load.end > computed and (pure or not computed)
        if load.is_front_first and load.origin is not None:
            loaded = slots.adapter_versions[slots.adapter_index[slot]]
            fits &= load.origin.first_version != loaded  # otherwise no token shows the mixture
        if fits and load.session_cache is not None:
            n = min(len(load.session_cache.tokens), known)
            fits = bool((slots.tokens[slot, :n] == load.session_cache.tokens[:n]).all())
            fits &= (
                self._weights.adapter_indices.get(load.session_cache.adapter)
                == slots.adapter_index[slot]
            )
        load.is_cancelled = not fits
        if fits:
            self.active_loads[slot] = load
            self._place_received_chunks(slot, load)

    def plan_compute_tokens(
        self, slot: int, load: PrefixLoad, max_tokens: int, tokens_per_s: float
    ) -> int:
        """Return how many tokens of a loading slot the engine computes now."""
        computed, now_s = int(self._slots.num_computed_tokens[slot]), self._clock.monotonic()
        if load.is_front_first and load.is_stalled(now_s):
            self.cancel_load(slot)
            return max_tokens
        count = load.plan_compute_tokens(computed, max_tokens, tokens_per_s, now_s)
        load.claimed_end = max(load.claimed_end, computed + count)
        return count

    def place_received_chunks(self) -> None:
        """Install received chunks in the cache, as far as there are free blocks."""
        for slot, load in list(self.active_loads.items()):
            if not len(
                self._paged_cache.find_slots_short_of_blocks(
                    np.array([slot]), self._slots.num_tokens[[slot]]
                )
            ):
                self._place_received_chunks(slot, load)

    def _place_received_chunks(self, slot: int, load: PrefixLoad) -> None:
        for start, end, content in load.take_chunks(self._clock.monotonic()):
            right = len(content) == self._compute.span_bytes(start, end)
            room = not len(
                self._paged_cache.find_slots_short_of_blocks(np.array([slot]), np.array([end]))
            )
            if right and room and load.claimed_end <= start < load.end:
                self._compute.write_cache(slot, start, end, content)
                load.loaded_spans[start] = min(end, load.end)
        self.skip_loaded_tokens(slot)

    def skip_loaded_tokens(self, slot: int) -> None:
        """Skip loaded tokens that the slot's computed tokens have reached."""
        load, slots = self.active_loads.get(slot), self._slots
        if load is None:
            return
        computed = int(slots.num_computed_tokens[slot])
        reached = load.skip_loaded(computed)
        if reached > computed:
            slots, origin = self._slots, load.origin
            if load.is_front_first:
                slots.cache_weights_id[slot] = OTHER_WEIGHTS_ID
            sampled = origin is not None and origin.first_sampled_index < reached
            if (
                origin is not None
                and sampled
                and slots.first_sampled_index[slot] > origin.first_sampled_index
            ):
                slots.first_sampled_index[slot] = origin.first_sampled_index
                slots.versions[slot, origin.first_sampled_index] = origin.first_version
            slots.num_computed_tokens[slot] = load.claimed_end = reached
            self._paged_cache.publish_prefix(slot, include_tail=True)
        if load.is_done(reached):
            self.cancel_load(slot)

    def cancel_load(self, slot: int) -> None:
        """Cancel the load of a slot."""
        load = self.active_loads.pop(slot, None)
        if load is not None:
            load.is_cancelled = True

    def offload(self, slot: int, is_evicted: bool, copy_budget_s: float = COPY_BUDGET_S) -> None:
        """Offer a slot's computed tokens to the store."""
        slots = self._slots
        n = int(slots.num_computed_tokens[slot])
        if self.store is None or n < MIN_PREFIX_TOKENS or not self._weights.is_complete:
            return
        pure = bool(slots.cache_weights_id[slot] == slots.get_weights_id(slot))
        first = min(int(slots.first_sampled_index[slot]), n)
        own = int(slots.adapter_versions[slots.adapter_index[slot]])
        version = int(slots.versions[slot, first]) if first < n else own
        prefix = OffloadedPrefix(
            tokens=slots.tokens[slot, :n].astype(np.int32),
            session=int(slots.session_id[slot]),
            adapter=self._weights.get_adapter_name(int(slots.adapter_index[slot])),
            is_single_version=pure,
            is_evicted=is_evicted,
            copy_budget_s=copy_budget_s,
            origin=CacheOrigin(first, version),
            read=partial(self._compute.read_cache, slot),
        )
        self.store.offload(prefix)

    def offload_all(self) -> None:
        """Offer the computed tokens of all slots to the store, before the engine exits."""
        until_s = self._clock.monotonic() + FINAL_COPY_BUDGET_S
        for slot in range(self._slots.num_slots):
            left_s = until_s - self._clock.monotonic()
            if left_s > 0:
                self.offload(slot, is_evicted=True, copy_budget_s=left_s)


def describe_cache(slots: Slots, slot: int, layout: str, adapter: str) -> SessionCache | None:
    """Describe what a slot has computed, with the adapter of this name.

    Return None if another engine could use none of it.
    """
    n = int(slots.num_computed_tokens[slot])
    first = min(int(slots.first_sampled_index[slot]), n)
    mixed = bool(slots.cache_weights_id[slot] != slots.get_weights_id(slot))
    version = int(slots.adapter_versions[slots.adapter_index[slot]])
    if not n or (mixed and first == n):
        return None
    return SessionCache(
        tokens=slots.tokens[slot, :n].astype(np.int32),
        layout=layout,
        version=MIXED_VERSIONS if mixed else version,
        first_sampled_index=first,
        first_version=int(slots.versions[slot, first]) if first < n else version,
        adapter=adapter,
    )


def has_other_version_sample(cache: SessionCache, version: int) -> bool:
    """Return True if a token of a cache was sampled by weights other than this version's."""
    return cache.first_sampled_index < len(cache.tokens) and cache.first_version != version
