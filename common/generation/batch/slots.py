"""Slots of the built-in engine: the state of each request in arrays, without a Python object per
slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.expert_routing import NO_EXPERTS
from meshrl.common.generation.batch.adapter_deltas import MAX_ADAPTERS
from meshrl.common.generation.counter_rng import seed_to_key
from meshrl.common.generation.engine_contract import (
    NO_FLOATS,
    NO_SESSION,
    EngineOutput,
    GenerationRequest,
    RequestOutput,
    combine_outputs,
    concatenate_outputs,
)

NO_REQUEST = -1  # request id of a slot without a request


class Slots:
    """State of each slot.

    A slot has `num_tokens` prompt tokens and sampled tokens, of which the first
    `num_computed_tokens` are in the cache. A slot is free, runs a request, or retains an idle
    session's tokens until another request needs the slot. The session that is idle for longest is
    evicted first.
    """

    def __init__(self, num_slots: int, max_length: int, experts_per_token: int = 0) -> None:
        """Allocate the arrays.

        `experts_per_token`: experts of a token, all layers together; 0: the model is dense.

        Weights get a new id at each update: those of the base at index 0, and of the base with each
        adapter at indices from 1 on. A cache belongs to the weights that computed it.
        """
        self.num_slots, self.max_length = num_slots, max_length
        self.tokens = np.zeros((num_slots, max_length), np.int64)
        self.logprobs = np.zeros((num_slots, max_length), np.float32)
        self.raw_logprobs = np.full((num_slots, max_length), np.nan, np.float32)
        self.versions = np.zeros((num_slots, max_length), np.int32)
        # Experts that predicted a sampled token. Pages take memory at their first write.
        self.experts = np.zeros((num_slots, max_length, experts_per_token), np.int16)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_computed_tokens = np.zeros(num_slots, np.int64)
        # known tokens at which the request ends with LENGTH
        self.max_tokens = np.zeros(num_slots, np.int64)
        self.num_drained_tokens = np.zeros(num_slots, np.int64)
        # index; max_length: none sampled here
        self.first_sampled_index = np.zeros(num_slots, np.int64)
        self.adapter_index = np.zeros(num_slots, np.int32)  # adapter index of the slot
        # ids of the loaded weights, by adapter index
        self.weights_ids = np.zeros(MAX_ADAPTERS + 1, np.int64)
        # versions of the loaded weights, by adapter index
        self.adapter_versions = np.full(MAX_ADAPTERS + 1, -1, np.int32)
        # id of the weights of the cache's first entry
        self.cache_weights_id = np.zeros(num_slots, np.int64)
        self.request_id = np.full(num_slots, NO_REQUEST, np.int64)
        self.session_id = np.full(num_slots, NO_SESSION, np.int64)
        self.rng_key = np.zeros(num_slots, np.uint64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.wants_raw_logprobs = np.zeros(num_slots, bool)
        self.is_adjusted = np.zeros(num_slots, bool)  # False: the next six arrays do not count
        self.repetition_penalty = np.ones(num_slots, np.float32)
        self.presence_penalty = np.zeros(num_slots, np.float32)
        self.output_start = np.zeros(num_slots, np.int64)
        self.stop_start = np.zeros(num_slots, np.int64)  # known tokens before a stop id is possible
        self.biased_ids = np.full((num_slots, 1), -1, np.int64)  # padded with -1
        self.biases = np.zeros((num_slots, 1), np.float32)
        self.finish_reason = np.zeros(num_slots, np.int8)  # finish reason of the last request
        self.stop_ids = np.full((num_slots, 4), -1, np.int64)  # padded with -1
        self._slot_of_request: dict[int, int] = {}  # request id -> slot
        self._idle_slots: dict[int, int] = {}  # session -> slot, longest idle first
        self._free_slots = list(range(num_slots))  # heap: low slots first keeps the batch dense
        self._finished_outputs: list[RequestOutput] = []

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        return len(self._slot_of_request)

    @property
    def has_finished(self) -> bool:
        """True if a request has finished since the last drain."""
        return bool(self._finished_outputs)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slot_of_request

    def has_idle_session(self, session: int) -> bool:
        """Return True if an idle slot has the cache of this session."""
        return session in self._idle_slots

    def has_available_slot(self) -> bool:
        """Return True if a request can get a slot now: one is free, or idle and may be reused."""
        return bool(self._free_slots or self._idle_slots)

    def find_eviction_victim(self, session: int) -> int | None:
        """Return the idle slot that a request of the session would evict, or None."""
        if session in self._idle_slots or self._free_slots or not self._idle_slots:
            return None
        return self._idle_slots[next(iter(self._idle_slots))]

    def get_weights_id(self, slot: int) -> int:
        """Return the id of the weights that compute the slot's next token."""
        return int(self.weights_ids[self.adapter_index[slot]])

    def assign_slot(self, request: GenerationRequest, adapter_index: int = 0) -> int:
        """Assign a slot to `request`; count tokens that its session left there as computed.

        If a session diverges from its cache, only entries of the loaded weights are retained,
        because no token would show a mixture. Entries of another adapter are never retained.
        """
        slot = self._idle_slots.pop(request.session, -1)
        if slot < 0:
            free = self._free_slots
            slot = (
                heapq.heappop(free) if free else self._idle_slots.pop(next(iter(self._idle_slots)))
            )
            self.num_computed_tokens[slot] = 0
        weights = int(self.weights_ids[adapter_index])
        if self.adapter_index[slot] != adapter_index:
            self.adapter_index[slot], self.num_computed_tokens[slot] = adapter_index, 0
        n, tokens = len(request.tokens), request.tokens
        cached = min(int(self.num_computed_tokens[slot]), n)
        same = tokens[:cached] == self.tokens[slot, :cached]
        num_reused = cached if same.all() else int(same.argmin())
        # The first token sampled over the cache shows its weights; later tokens may have other
        # versions.
        first = int(self.first_sampled_index[slot])
        shows = first < n and int(tokens[first]) == int(self.tokens[slot, first])
        goes_on = num_reused == self.num_computed_tokens[slot] and shows
        if self.cache_weights_id[slot] != weights and not goes_on:
            num_reused = 0
        # the last token runs again, because the next one is sampled from its logits
        num_reused = min(num_reused, n - 1)
        if num_reused == 0:
            self.cache_weights_id[slot] = weights
        if self.first_sampled_index[slot] >= num_reused:
            self.first_sampled_index[slot] = self.max_length
        self.tokens[slot, :n] = tokens
        self.num_tokens[slot] = self.num_drained_tokens[slot] = n
        self.num_computed_tokens[slot] = num_reused
        self.max_tokens[slot] = min(n + request.max_new_tokens, self.max_length)
        self.request_id[slot], self.session_id[slot] = request.id, request.session
        self.rng_key[slot], self.temperature[slot] = seed_to_key(request.seed), request.temperature
        self.top_p[slot], self.min_p[slot] = request.top_p, request.min_p
        self.top_k[slot], self.wants_raw_logprobs[slot] = request.top_k, request.wants_raw_logprobs
        self.finish_reason[slot] = FinishReason.RUNNING
        self.stop_ids = _set_padded_row(self.stop_ids, slot, request.stop_ids, -1)
        self._set_adjustments(slot, request)
        self._slot_of_request[request.id] = slot
        return slot

    def finish_request(self, slot: int, reason: FinishReason) -> list[int]:
        """Finish the slot's request and return the slots that this frees.

        The request's session, if any, retains the slot as idle.
        """
        request, session = int(self.request_id[slot]), int(self.session_id[slot])
        self._finished_outputs.append(self._build_output(slot, reason))
        del self._slot_of_request[request]
        self.request_id[slot] = NO_REQUEST
        if session < 0:
            self._free_slot(slot)
            return [slot]
        freed = [self._idle_slots.pop(session)] if session in self._idle_slots else []
        for other in freed:
            self._free_slot(other)
        self._idle_slots[session] = slot
        return freed

    def finish_without_slot(self, request_id: int, reason: FinishReason) -> None:
        """Finish a request that never had a slot, with `reason` and no tokens."""
        none = np.zeros(0, np.int64)
        self._finished_outputs.append(
            RequestOutput(request_id, none, none.astype(np.float32), none, reason)
        )

    def find_slot(self, request_id: int) -> int | None:
        """Return the slot of a running request, or None."""
        return self._slot_of_request.get(request_id)

    def find_idle_slot(self, session: int) -> int | None:
        """Return the idle slot that has this session, or None."""
        return self._idle_slots.get(session)

    def list_running_slots(self) -> list[int]:
        """Return the slots that run a request."""
        return list(self._slot_of_request.values())

    def list_idle_slots(self) -> list[int]:
        """Return the slots of idle sessions, longest idle first."""
        return list(self._idle_slots.values())

    def release_sessions(self, sessions: Iterable[int]) -> list[int]:
        """End sessions and return the slots that this frees."""
        released = set(sessions)
        freed = [self._idle_slots.pop(session) for session in released & self._idle_slots.keys()]
        for slot in freed:
            self._free_slot(slot)
        self.session_id[np.isin(self.session_id, list(released))] = NO_SESSION
        return freed

    def find_slots_without_samples(self) -> NDArray[np.bool_]:
        """Return the slots whose cache has no token that was sampled here [slots].

        Under other weights, their next token would carry the new version over cache entries of the
        old one, undetectably.
        """
        return self.first_sampled_index >= self.num_tokens

    def invalidate_cache(self, slots: NDArray[np.bool_]) -> list[int]:
        """Mark all tokens of the masked slots [slots] as not computed, and return these slots."""
        self.num_computed_tokens[slots] = 0
        empty = self.num_computed_tokens == 0
        self.cache_weights_id[empty] = self.weights_ids[self.adapter_index[empty]]
        return np.flatnonzero(slots).tolist()

    def append_sampled(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        raw_logprobs: NDArray[np.float32],
        experts: NDArray[np.int16] = NO_EXPERTS,
    ) -> None:
        """Append a sampled token to each slot; `finish_reason` marks the requests that it ends."""
        at = self.num_tokens[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.raw_logprobs[slots, at] = raw_logprobs
        self.versions[slots, at] = self.adapter_versions[self.adapter_index[slots]]
        if self.experts.size:
            self.experts[slots, at] = experts
        self.num_tokens[slots] = at + 1
        stopped = (self.stop_ids[slots] == tokens[:, None]).any(1)
        full = np.where(at + 1 >= self.max_tokens[slots], FinishReason.LENGTH, FinishReason.RUNNING)
        self.finish_reason[slots] = np.where(stopped, FinishReason.STOP, full)

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        """Return the tokens since the last drain, each once, or None.

        `finished_only` leaves out requests that still run.
        """
        finished, self._finished_outputs = combine_outputs(self._finished_outputs), []
        if finished_only:
            return finished
        live = np.flatnonzero(
            (self.request_id != NO_REQUEST) & (self.num_tokens > self.num_drained_tokens)
        )
        if not len(live):
            return finished
        start, end = self.num_drained_tokens[live], self.num_tokens[live]
        counts = end - start
        rows = np.repeat(live, counts)
        offsets = np.repeat(start - (np.cumsum(counts) - counts), counts)
        columns = np.arange(len(rows)) + offsets
        self.num_drained_tokens[live] = end
        growing = EngineOutput(
            ids=self.request_id[live],
            counts=counts.astype(np.int32),
            tokens=self.tokens[rows, columns].astype(np.int32),
            logprobs=self.logprobs[rows, columns],
            raw_logprobs=self._select_raw_logprobs(live, rows, columns),
            versions=self.versions[rows, columns],
            finish_reasons=np.full(len(live), FinishReason.RUNNING, np.int8),
            experts=self.experts[rows, columns] if self.experts.size else NO_EXPERTS,
        )
        return growing if finished is None else concatenate_outputs(finished, growing)

    def _select_raw_logprobs(
        self, live: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        if not self.wants_raw_logprobs[live].any():
            return NO_FLOATS
        wants_raw = self.wants_raw_logprobs[rows]
        return np.where(wants_raw, self.raw_logprobs[rows, columns], np.float32(np.nan))

    def _build_output(self, slot: int, reason: FinishReason) -> RequestOutput:
        new = slice(int(self.num_drained_tokens[slot]), int(self.num_tokens[slot]))
        return RequestOutput(
            int(self.request_id[slot]),
            self.tokens[slot, new].astype(np.int32),
            self.logprobs[slot, new].copy(),
            self.versions[slot, new].copy(),
            reason,
            self.raw_logprobs[slot, new].copy() if self.wants_raw_logprobs[slot] else None,
            self.experts[slot, new].copy() if self.experts.size else None,
        )

    def _free_slot(self, slot: int) -> None:
        self.session_id[slot] = NO_SESSION
        heapq.heappush(self._free_slots, slot)

    def _set_adjustments(self, slot: int, request: GenerationRequest) -> None:
        adjustments = request.adjustments
        self.is_adjusted[slot] = not adjustments.is_neutral
        if adjustments.is_neutral:
            return
        self.repetition_penalty[slot] = adjustments.repetition_penalty
        self.presence_penalty[slot] = adjustments.presence_penalty
        self.output_start[slot], self.stop_start[slot] = request.output_start, request.stop_start
        bias = adjustments.logit_bias
        self.biased_ids = _set_padded_row(self.biased_ids, slot, [token for token, _ in bias], -1)
        self.biases = _set_padded_row(self.biases, slot, [number for _, number in bias], 0)


def _set_padded_row(
    array: NDArray[Any], row: int, values: Sequence[float], padding: int
) -> NDArray[Any]:
    """Write values and padding into a row of `array`; return it, or a wider copy if needed."""
    missing = len(values) - array.shape[1]
    if missing > 0:
        array = np.pad(array, ((0, 0), (0, missing)), constant_values=padding)
    array[row] = padding
    array[row, : len(values)] = values
    return array
