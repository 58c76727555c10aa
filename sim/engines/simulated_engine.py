"""Engine without a model: tokens are hashes, generated at a declared rate of a given clock.

It serves simulations under virtual time and load tests. Each running request advances by
`tokens_per_s`, independent of the others. `step` returns all due tokens and is never early. Slots
are columns of arrays, and tokens are created when they are drained, so a step needs no Python code
per request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Refused
from meshrl.common.generation.counter_rng import draw_uint64, draw_uniforms, seed_to_key
from meshrl.common.generation.engine_contract import (
    NO_FLOATS,
    NO_VERSION,
    EngineOutput,
    GenerationRequest,
    IntArray,
    RequestOutput,
    WithoutCacheTransfer,
    adapter_in_use_error,
    check_request,
    combine_outputs,
    concatenate_outputs,
    no_weights_error,
    quarantine_on_error,
)

if TYPE_CHECKING:
    from torch import Tensor


STANDARD_NORMAL = NormalDist()
_TOKEN_EPSILON = 1e-9  # share of a token: a step at exactly the time of a token returns it
NO_END_S = math.inf  # end time of a free slot
NO_STOP_TOKEN = np.iinfo(np.int32).max  # above every token


class _SimulatedSlots:
    """Running requests and their progress by slot. `produced_tokens` counts due tokens,
    `flushed_tokens` those returned.
    """

    def __init__(self, count: int) -> None:
        self.requests: list[GenerationRequest | None] = [None] * count
        self.slot_of: dict[int, int] = {}  # request id -> slot
        self.free = list(range(count - 1, -1, -1))  # the next one last
        self.request_ids = np.full(count, -1, np.int64)
        self.started_s = np.zeros(count)
        self.ends_s = np.full(count, NO_END_S)
        self.final_length = np.zeros(count, np.int64)  # tokens generated at its end
        self.produced_tokens = np.zeros(count, np.int64)
        self.flushed_tokens = np.zeros(count, np.int64)
        self.prompt_tokens = np.zeros(count, np.int64)  # tokens of the prompt
        self.random_key = np.zeros(count, np.uint64)
        # in order, padded with NO_STOP_TOKEN
        self.stop_tokens = np.full((count, 1), NO_STOP_TOKEN, np.int64)
        self.drawable_tokens = np.ones(count, np.uint64)  # vocabulary without the stops
        self.finish_reason = np.zeros(count, np.int8)  # final finish reason
        self.wants_raw_logprobs = np.zeros(count, bool)  # requested
        self.adapter_index = np.zeros(count, np.int64)  # of its adapter; 0: none

    def assign(
        self,
        request: GenerationRequest,
        start_s: float,
        ends_s: float,
        final_length: int,
        finish_reason: FinishReason,
        vocab_size: int,
        adapter_index: int,
    ) -> int:
        slot = self.free.pop()
        self.requests[slot], self.slot_of[request.id] = request, slot
        self.request_ids[slot], self.started_s[slot], self.ends_s[slot] = (
            request.id,
            start_s,
            ends_s,
        )
        self.final_length[slot], self.finish_reason[slot] = final_length, finish_reason
        self.produced_tokens[slot] = self.flushed_tokens[slot] = 0
        self.prompt_tokens[slot], self.random_key[slot] = (
            len(request.tokens),
            seed_to_key(request.seed),
        )
        stops = sorted({t for t in request.stop_ids if 0 <= t < vocab_size})
        missing = len(stops) - self.stop_tokens.shape[1]
        if missing > 0:
            self.stop_tokens = np.pad(
                self.stop_tokens, ((0, 0), (0, missing)), constant_values=NO_STOP_TOKEN
            )
        self.stop_tokens[slot] = NO_STOP_TOKEN
        self.stop_tokens[slot, : len(stops)] = stops
        self.drawable_tokens[slot] = vocab_size - len(stops)
        self.wants_raw_logprobs[slot], self.adapter_index[slot] = (
            request.wants_raw_logprobs,
            adapter_index,
        )
        return slot

    def clear(self, slot: int) -> GenerationRequest:
        request = self.requests[slot]
        assert request is not None
        self.requests[slot] = None
        del self.slot_of[request.id]
        self.request_ids[slot], self.ends_s[slot] = -1, NO_END_S
        self.produced_tokens[slot] = self.flushed_tokens[slot] = self.final_length[slot] = 0
        self.free.append(slot)
        return request

    def draw_tokens(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Draw the new tokens at `positions` of `slots`: a hash of (seed, position) in the
        vocabulary without stop ids. A stopping request ends with a stop id.
        """
        drawn = (
            draw_uint64(self.random_key[slots], self.prompt_tokens[slots] + positions)
            % self.drawable_tokens[slots]
        )
        tokens = drawn.astype(np.int64)
        for stop in self.stop_tokens.T:
            tokens += tokens >= stop[slots]
        last = (positions + 1 == self.final_length[slots]) & (
            self.finish_reason[slots] == FinishReason.STOP
        )
        for i in np.flatnonzero(last).tolist():
            request = self.requests[int(slots[i])]
            assert request is not None
            tokens[i] = request.stop_ids[0]
        return tokens


class SimulatedEngine(WithoutCacheTransfer):
    """Simulated engine. The token at position p of a request is a hash of (its seed, p). Lengths
    are log-normal, drawn from (engine seed, request seed, context length), and limited by
    `max_new_tokens` and the slot. A request without stop ids always runs to that limit. Every
    token has log-probability -ln(vocab_size).
    """

    def __init__(
        self,
        clock: Clock,
        slots: int,
        tokens_per_s: float = 40.0,
        seed: int = 0,
        *,
        vocab_size: int = 64,
        max_length: int = 32768,
        lengths: tuple[float, float] = (200.0, 0.8),  # median in tokens, deviation of the logarithm
        version: int = 0,
    ) -> None:
        self.version = version
        self._adapter_indices = {"": 0}  # by name of the adapter, permanent
        self._adapter_versions: dict[str, int] = {}  # by name
        self.tokens_generated = self.tokens_computed = 0
        self.busy_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.cache_bytes_per_token = self.cache_tokens = 0  # no cache
        self.backend, self.num_preempted = "simulated", 0
        self.tensor_parallel_size = 1
        self.vocab_size, self.max_length = vocab_size, max_length
        self._clock, self._tokens_per_s, self._seed = clock, tokens_per_s, seed
        self._median, self._sigma = lengths
        self._logprob = np.float32(-math.log(vocab_size))
        self._slots = _SimulatedSlots(slots)
        self._queue: deque[GenerationRequest] = deque()
        self._finished_outputs: list[RequestOutput] = []  # unflushed output of ended requests
        # Earlier versions: adapter, version and last position.
        self._version_history: list[tuple[int, int, NDArray[np.int64]]] = []
        self._now_s = clock.monotonic()  # all tokens up to this time are produced
        self._is_paused = self._is_asleep = False

    @property
    def num_running(self) -> int:
        return len(self._slots.slot_of)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_finished(self) -> bool:
        return bool(self._finished_outputs)

    @property
    def next_step_delay_s(self) -> float:
        if not self._slots.slot_of:
            return 0.0
        live = self._slots.request_ids >= 0
        next_s = self._slots.started_s + (self._slots.produced_tokens + 1) / self._tokens_per_s
        return max(0.0, float(next_s[live].min()) - self._clock.monotonic())

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            check_request(request, self.vocab_size, self._adapter_versions)
            if request.stop_strings:
                raise Refused(
                    f"request {request.id} has stop texts, but this engine has no tokenizer",
                    where="engine",
                    fix="Use stop token ids",
                )
        self._advance()
        known = self._slots.slot_of.keys() | {request.id for request in self._queue}
        for request in requests:
            if request.id in known:
                continue
            known.add(request.id)
            if request.max_new_tokens < 1 or len(request.tokens) >= self.max_length:
                self._finished_outputs.append(_make_empty_output(request.id, FinishReason.LENGTH))
            else:
                self._queue.append(request)
        self._fill_slots(self._now_s)

    def abort(self, ids: Iterable[int]) -> None:
        self._advance()
        aborted_ids = set(ids)
        waiting = [request.id for request in self._queue if request.id in aborted_ids]
        self._queue = deque(request for request in self._queue if request.id not in aborted_ids)
        self._finished_outputs += [
            _make_empty_output(request_id, FinishReason.ABORTED) for request_id in waiting
        ]
        for request_id in [i for i in self._slots.slot_of if i in aborted_ids]:
            self._finish_request(self._slots.slot_of[request_id], FinishReason.ABORTED)
        self._fill_slots(self._now_s)

    def release_sessions(self, sessions: Iterable[int]) -> None:
        """Release sessions, which hold nothing here."""

    # -- time ------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Number of tokens that each slot could have produced while the engine was in use."""
        return int(self.busy_s * self._tokens_per_s + _TOKEN_EPSILON)

    def step(self) -> bool:
        self._advance()
        return not self._is_stopped and bool(self._slots.slot_of or self._queue)

    @property
    def _is_stopped(self) -> bool:
        return self._is_paused or self.version == NO_VERSION

    def pause(self) -> None:
        self._advance()
        self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._restart_clock()

    def _restart_clock(self) -> None:
        """Shift the requests by the time of the pause."""
        if self._is_stopped:
            return
        now = self._clock.monotonic()
        self._slots.started_s += now - self._now_s
        self._slots.ends_s += now - self._now_s
        self._now_s = now

    def _advance(self) -> None:
        """Produce all due tokens; a freed slot is reused from the time of its end."""
        if self._is_stopped:
            return
        slots, now = self._slots, self._clock.monotonic()
        if slots.slot_of:
            self.busy_s += now - self._now_s
        while slots.slot_of and slots.ends_s[slot := int(slots.ends_s.argmin())] <= now:
            ended_s = float(slots.ends_s[slot])
            self._count_tokens(int(slots.final_length[slot] - slots.produced_tokens[slot]))
            slots.produced_tokens[slot] = slots.final_length[slot]
            self._finish_request(slot, FinishReason(slots.finish_reason[slot]))
            self._fill_slots(ended_s)
        due = ((now - slots.started_s) * self._tokens_per_s + _TOKEN_EPSILON).astype(np.int64)
        produced_tokens = np.maximum(np.minimum(due, slots.final_length - 1), slots.produced_tokens)
        self._count_tokens(int((produced_tokens - slots.produced_tokens).sum()))
        slots.produced_tokens = produced_tokens
        self._now_s = now

    def _count_tokens(self, tokens: int) -> None:
        self.tokens_generated += tokens
        self.tokens_computed += tokens

    def _fill_slots(self, at_s: float) -> None:
        while self._queue and self._slots.free:
            request = self._queue.popleft()
            token_limit = min(request.max_new_tokens, self.max_length - len(request.tokens))
            length = (
                min(token_limit, self._draw_length(request)) if request.stop_ids else token_limit
            )
            finish = (
                FinishReason.STOP
                if request.stop_ids and length < token_limit
                else FinishReason.LENGTH
            )
            ends_s = at_s + length / self._tokens_per_s
            about = request, at_s, ends_s, length, finish, self.vocab_size
            slot = self._slots.assign(*about, self._adapter_indices[request.adapter])
            for _, _, until in self._version_history:
                until[slot] = 0
            self.tokens_computed += len(request.tokens)

    def _draw_length(self, request: GenerationRequest) -> int:
        key = np.array([seed_to_key(request.seed ^ seed_to_key(self._seed))], np.uint64)
        uniform = float(draw_uniforms(key, np.array([len(request.tokens)]))[0])
        return max(
            1, round(self._median * math.exp(self._sigma * STANDARD_NORMAL.inv_cdf(uniform)))
        )

    # -- weights ---------------------------------------------------------------------------------

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Update the weights: read all tensors, as other engines do, without using them."""
        self._advance()
        with quarantine_on_error(version, self.quarantine):
            for name in state:
                state[name]
        self._set_version(version)
        self._restart_clock()

    def _set_version(self, version: int) -> None:
        self._version_history.append((0, self.version, self._slots.produced_tokens.copy()))
        self.version = version

    @property
    def adapter_versions(self) -> Mapping[str, int]:
        return dict(self._adapter_versions)

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        self._advance()
        for factor in tensors:
            tensors[factor]
        number = self._adapter_indices.setdefault(name, len(self._adapter_indices))
        if name in self._adapter_versions:
            self._version_history.append(
                (number, self._adapter_versions[name], self._slots.produced_tokens.copy())
            )
        self._adapter_versions[name] = version

    def quarantine(self) -> None:
        self._advance()
        self._set_version(NO_VERSION)

    def unload_adapter(self, name: str) -> None:
        self._advance()
        requests = [r for r in self._slots.requests if r is not None]
        if any(request.adapter == name for request in [*requests, *self._queue]):
            raise adapter_in_use_error(name)
        self._adapter_versions.pop(name, None)

    def sleep(self) -> None:
        self._is_asleep = True
        self.pause()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        self.update_weights(state, version)
        if self._is_asleep:
            self._is_asleep = False
            self.resume()

    def score(self, tokens: IntArray, adapter: str = "") -> NDArray[np.float32]:
        if self.version == NO_VERSION:
            raise no_weights_error()
        return np.full(len(tokens) - 1, self._logprob, np.float32)

    # -- output ----------------------------------------------------------------------------------

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        finished, self._finished_outputs = combine_outputs(self._finished_outputs), []
        if finished_only:
            return finished
        growth = self._collect_output(
            np.flatnonzero(self._slots.produced_tokens > self._slots.flushed_tokens)
        )
        self._version_history.clear()
        if finished is None or growth is None:
            return finished or growth
        return concatenate_outputs(finished, growth)

    def _collect_output(self, slot_ids: NDArray[np.int64]) -> EngineOutput | None:
        """Collect the tokens produced in slots since their last flush."""
        if not len(slot_ids):
            return None
        slots = self._slots
        start, counts = (
            slots.flushed_tokens[slot_ids],
            slots.produced_tokens[slot_ids] - slots.flushed_tokens[slot_ids],
        )
        total = int(counts.sum())
        rows = np.repeat(slot_ids, counts)
        places = np.arange(total) + np.repeat(start - (np.cumsum(counts) - counts), counts)
        loaded = [
            self._adapter_versions.get(name, -1) if name else self.version
            for name in self._adapter_indices
        ]
        adapters = slots.adapter_index[rows]
        versions = np.array(loaded, np.int32)[adapters]
        for adapter, version, until in reversed(self._version_history):
            versions[(adapters == adapter) & (places < until[rows])] = version
        slots.flushed_tokens[slot_ids] = slots.produced_tokens[slot_ids]
        logprobs = np.full(total, self._logprob, np.float32)
        wants_raw = slots.wants_raw_logprobs[rows]
        nan = np.float32(np.nan)
        return EngineOutput(
            ids=slots.request_ids[slot_ids],
            counts=counts.astype(np.int32),
            tokens=slots.draw_tokens(rows, places).astype(np.int32),
            logprobs=logprobs,
            raw_logprobs=np.where(wants_raw, logprobs, nan) if wants_raw.any() else NO_FLOATS,
            versions=versions,
            finish_reasons=np.full(len(slot_ids), FinishReason.RUNNING, np.int8),
        )

    def _finish_request(self, slot: int, finish_reason: FinishReason) -> None:
        """Finish the request of a slot, with its unflushed tokens."""
        rest = None
        if self._slots.produced_tokens[slot] > self._slots.flushed_tokens[slot]:
            rest = self._collect_output(np.array([slot]))
        wants_raw = bool(self._slots.wants_raw_logprobs[slot])
        request = self._slots.clear(slot)
        if rest is None:
            self._finished_outputs.append(_make_empty_output(request.id, finish_reason))
            return
        unmodified = rest.raw_logprobs if wants_raw else None
        piece = RequestOutput(
            request.id, rest.tokens, rest.logprobs, rest.versions, finish_reason, unmodified
        )
        self._finished_outputs.append(piece)


def _make_empty_output(request_id: int, finish_reason: FinishReason) -> RequestOutput:
    none = np.zeros(0, np.int32)
    return RequestOutput(request_id, none, NO_FLOATS, none, finish_reason)
