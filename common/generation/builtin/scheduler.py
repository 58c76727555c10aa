"""Scheduler of the built-in engine: the slots that compute in a step, and those preempted."""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import StepCompute
from meshrl.common.generation.builtin.loaded_weights import LoadedWeights
from meshrl.common.generation.builtin.prefix_loads import PrefixLoads
from meshrl.common.generation.builtin.stop_strings import StopStringChecker
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.job.memory.cache_blocks import MAX_PREFILL_TOKENS

# shared tokens from which on reuse of another slot's blocks beats computing them
MIN_SHARED_TOKENS = 6
# tokens to compute from which on a slot prefills: each is a row of the same step
MIN_PREFILL_TOKENS = 2
RATE_HALF_LIFE_TOKENS = (
    8192  # tokens that halve the weight of a measured rate: engines warm up, contexts grow
)


class PrefillRate:
    """Running average of the prefill rate, which predicts the time to recompute a cache."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Known tokens computed per second; 0: not measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add_step(self, prefill_tokens: int, total_tokens: int, seconds: float) -> None:
        """Add a step of `total_tokens` tokens, of which `prefill_tokens` were known.

        The time is divided evenly: each token is a row, whether it was known or is decoded.
        """
        if not seconds:
            return  # below the clock's resolution
        fade = 0.5 ** (prefill_tokens / RATE_HALF_LIFE_TOKENS)
        self._tokens = self._tokens * fade + prefill_tokens
        self._seconds = self._seconds * fade + seconds * prefill_tokens / total_tokens


class BatchScheduler:
    """Running slots of one engine.

    Some decode a token a step; the others prefill, with more tokens to compute. Older requests come
    first.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        paged_cache: PagedCache,
        weights: LoadedWeights,
        stop_text: StopStringChecker,
        clock: Clock,
        *,
        allow_mixed_versions: bool,
    ) -> None:
        """Initialize; `allow_mixed_versions`: caches of several versions are usable."""
        self.num_preempted = 0  # requests that lost their cache to older ones
        self.prefill_rate = PrefillRate()
        self.prefill_slots: list[
            int
        ] = []  # slots with more than one token to compute, oldest first
        self._slots, self._paged_cache, self._weights = slots, paged_cache, weights
        self._stop_checker = stop_text
        # start times: older requests come first
        self._start_order = np.zeros(slots.num_slots, np.int64)
        self._num_started = 0
        self._is_decoding = np.zeros(slots.num_slots, bool)
        self._decode_slots: NDArray[np.int64] | None = (
            None  # decoding slots, ascending; None: outdated
        )
        about = slots, compute, paged_cache, clock, self.prefill_slots, weights
        self.prefix_loads = PrefixLoads(*about, allow_mixed_versions=allow_mixed_versions)

    def plan_prefill(self) -> tuple[list[int], list[int]]:
        """Plan the prefilling slots of this step, oldest first, and their numbers of tokens.

        Slots whose prefix is being loaded get what the others leave of the budget.
        """
        slots, budget = self._slots, MAX_PREFILL_TOKENS
        chosen: list[int] = []
        counts: list[int] = []
        led: list[int] = []  # slots that compute or load shareable prefixes
        full = False  # a slot lacks blocks: no later one takes any
        loading = set(self.prefix_loads.active_loads)
        for slot in sorted(self.prefill_slots, key=self.prefix_loads.__contains__):
            if budget <= 0:
                break
            if slot in loading and slot not in self.prefix_loads:
                # the slot was preempted in this step: it must not take blocks of the chosen slots
                continue
            if slot not in self.prefix_loads:
                if full:
                    continue
                self._paged_cache.reuse_prefix(slot)
            if self._can_share_prefix_of(slot, led):
                continue
            older = int((self._is_decoding & (self._start_order < self._start_order[slot])).sum())
            if not self._make_room(slot, int(slots.num_tokens[slot]), spare=older):
                full = True
                continue
            load = self.prefix_loads.find_load(slot)
            ahead = int(slots.num_tokens[slot] - slots.num_computed_tokens[slot])
            if load is None and ahead < MIN_PREFILL_TOKENS and not self._is_prefix_of_next(slot):
                self.set_prefilling(slot, False)
                continue
            led.append(slot)
            count = min(ahead, budget)
            if load is not None:
                count = self.prefix_loads.plan_compute_tokens(
                    slot, load, count, self.prefill_rate.tokens_per_s
                )
            if count:
                budget -= count
                chosen.append(slot)
                counts.append(count)
        return chosen, counts

    def _can_share_prefix_of(self, slot: int, chosen: list[int]) -> bool:
        """Return True if a slot of this step computes a prefix that this slot could share later."""
        if not chosen:
            return False
        tokens, end = self._slots.tokens, int(self._slots.num_tokens[slot]) - 1
        least = int(self._slots.num_computed_tokens[slot]) + MIN_SHARED_TOKENS
        if end < least:
            return False
        same = (tokens[chosen, :least] == tokens[slot, :least]).all(1)
        same &= self._slots.adapter_index[chosen] == self._slots.adapter_index[slot]
        return bool((same & (self._slots.num_tokens[chosen] > least)).any())

    def _is_prefix_of_next(self, slot: int) -> bool:
        """Return True if the next prefilling slot could share what this slot would compute."""
        following = self.prefill_slots.index(slot) + 1
        return following < len(self.prefill_slots) and self._can_share_prefix_of(
            self.prefill_slots[following], [slot]
        )

    @property
    def decode_slots(self) -> NDArray[np.int64]:
        """Slots that decode, ascending."""
        if self._decode_slots is None:
            self._decode_slots = np.flatnonzero(self._is_decoding)
        return self._decode_slots

    def reserve_decode_blocks(self, num_steps: int) -> None:
        """Allocate blocks for the next tokens of decoding slots; the youngest may have to wait."""
        while True:
            rows = self.decode_slots
            ends = np.minimum(
                self._slots.num_computed_tokens[rows] + num_steps, self._slots.max_tokens[rows]
            )
            short = self._paged_cache.find_slots_short_of_blocks(rows, ends)
            if not len(short):
                return
            slot = int(short[np.argmin(self._start_order[short])])
            if not self._make_room(slot, int(ends[rows == slot][0])):
                self.preempt(slot)

    def _make_room(self, slot: int, tokens: int, spare: int = 0) -> bool:
        """Free blocks for a slot's first `tokens` tokens and `spare` blocks more.

        Evict idle sessions first, then preempt the youngest requests. Return False if only older
        ones are left.
        """
        while not self._paged_cache.allocate_blocks(slot, tokens, spare):
            idle = [i for i in self._slots.list_idle_slots() if self._slots.num_computed_tokens[i]]
            if idle:
                self.drop_cache(idle[0])
                continue
            holders = [
                i
                for i in self._slots.list_running_slots()
                if self._has_cache(i) and self._start_order[i] > self._start_order[slot]
            ]
            if not holders:
                return False
            self.preempt(max(holders, key=lambda i: self._start_order[i]))
        return True

    def _has_cache(self, slot: int) -> bool:
        """Return True if a slot has cache entries, or blocks for a load."""
        return bool(self._slots.num_computed_tokens[slot]) or slot in self.prefix_loads

    def drop_cache(self, slot: int, offload: bool = True) -> None:
        """Drop a slot's cache; with `offload`, offer it to the store first."""
        self.prefix_loads.cancel_load(slot)
        if offload:
            self.prefix_loads.offload(slot, is_evicted=True)
        self._paged_cache.free_slot(slot)
        self._slots.num_computed_tokens[slot] = 0
        self._slots.cache_weights_id[slot] = self._slots.get_weights_id(slot)
        if slot in self.prefill_slots:
            self.prefix_loads.unsearched_slots.add(slot)

    def preempt(self, slot: int) -> None:
        """Preempt the slot's request: drop its cache, to be computed again once there is room."""
        self.num_preempted += 1
        self.drop_cache(slot)
        self.set_prefilling(slot, True)

    def start_request(self, request: GenerationRequest) -> None:
        """Assign a slot to a request; an idle session may be evicted for it."""
        victim = self._slots.find_eviction_victim(request.session)
        if victim is not None:
            self.prefix_loads.offload(victim, is_evicted=True)
        slot = self._slots.assign_slot(request, self._weights.adapter_indices[request.adapter])
        self._paged_cache.prepare_slot(slot)
        self._stop_checker.add_slot(slot, request)
        self._num_started += 1
        self._start_order[slot] = self._num_started
        self.set_prefilling(slot, True)

    def finish_request(self, slot: int, reason: FinishReason) -> None:
        """Finish a slot's request."""
        self._is_decoding[slot] = False
        self._decode_slots = None
        self.prefix_loads.cancel_load(slot)
        if slot in self.prefill_slots:
            self.prefill_slots.remove(slot)
            self.prefix_loads.unsearched_slots.discard(slot)
        self._stop_checker.remove_slot(slot)
        self._paged_cache.publish_prefix(slot, include_tail=False)
        if not self._slots.num_computed_tokens[slot]:
            self._paged_cache.free_slot(slot)  # blocks for the load
        for freed in self._slots.finish_request(slot, reason):
            self._paged_cache.free_slot(freed)

    def set_prefilling(self, slot: int, is_prefilling: bool) -> None:
        """Set a slot to prefill, because it has tokens to compute again, or to decode."""
        self._is_decoding[slot] = not is_prefilling
        self._decode_slots = None
        if not is_prefilling:
            self.prefill_slots.remove(slot)
            self.prefix_loads.unsearched_slots.discard(slot)
            self.prefix_loads.withdraw_offer(int(self._slots.session_id[slot]))
            return
        self.prefix_loads.unsearched_slots.add(slot)
        if slot not in self.prefill_slots:
            insort(self.prefill_slots, slot, key=lambda i: self._start_order[i])

    def drop_caches(self, slots: NDArray[np.bool_]) -> None:
        """Drop the caches of slots [slots], because the weights have changed."""
        for slot in self._slots.invalidate_cache(slots):
            self._paged_cache.free_slot(slot)
        self.recompute(self._slots.num_computed_tokens == 0)

    def recompute(self, slots: NDArray[np.bool_]) -> None:
        """Set those of `slots` [slots] that decode to prefill."""
        for slot in np.flatnonzero(self._is_decoding & slots).tolist():
            self.set_prefilling(slot, True)

    def borrow_blocks(self, tokens: int) -> NDArray[np.int64] | None:
        """Borrow blocks for `tokens` tokens; evict slots if needed, idle ones first.

        Return None if the cache is too small.
        """
        while (blocks := self._paged_cache.borrow_blocks(tokens)) is None:
            holders = [i for i in range(self._slots.num_slots) if self._has_cache(i)]
            if not holders:
                return None
            idle = [i for i in holders if i in self._slots.list_idle_slots()]
            youngest = max(holders, key=lambda i: self._start_order[i])
            self.drop_cache(idle[0]) if idle else self.preempt(youngest)
        return blocks
