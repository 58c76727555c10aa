"""Built-in engine: the control of its steps and of the end of requests.

Continuous batching at token level: each step holds one token of every decoding request and, up to a
budget, known tokens (prompts, tool results) of requests that prefill. A backend computes the step
(`step_compute.py`): a native decoder, or the same model in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import ConfigError, CorruptData, Refused
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.generation.batch.adapter_deltas import build_adapter_deltas
from meshrl.common.generation.batch.cache_size import CachePlan
from meshrl.common.generation.batch.paged_cache import PagedCache
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import StepCompute
from meshrl.common.generation.builtin.loaded_weights import (
    LoadedWeights,
    check_shapes,
    get_tensor_shapes,
)
from meshrl.common.generation.builtin.prefix_loads import describe_cache
from meshrl.common.generation.builtin.scheduler import MIN_PREFILL_TOKENS, BatchScheduler
from meshrl.common.generation.builtin.stop_strings import StopStringChecker
from meshrl.common.generation.engine_contract import (
    NO_VERSION,
    EngineOutput,
    GenerationRequest,
    IntArray,
    SessionCache,
    adapter_in_use_error,
    check_request,
    no_weights_error,
    quarantine_on_error,
    sequence_too_long_error,
)
from meshrl.common.generation.engine_memory import CacheMemory
from meshrl.common.generation.prefix_loading import PrefixStore
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS
from meshrl.common.model.architecture.config import ModelConfig


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, independent of its backend."""

    kv_on_update: str = "keep"
    max_steps: int = 1  # maximum of steps in one call, if no request joins or ends
    step_budget_s: float = 0.02
    # decode of the tokenizer; None: no stop strings
    decode_tokens: Callable[[Sequence[int]], str] | None = None
    clock: Clock | None = None
    verify_weights: bool = (
        False  # compare loaded weights with the source, which doubles the load time
    )


class BuiltinEngine:
    """Built-in implementation of the contract `TokenEngine`.

    It sleeps until `wake` loads the first weights, of this model's shapes.
    """

    def __init__(
        self,
        slots: Slots,
        compute: StepCompute,
        paged_cache: PagedCache,
        config: ModelConfig,
        backend: str,
        options: EngineOptions,
        plan_cache: Callable[[], CachePlan],
    ) -> None:
        """Initialize; `plan_cache` is called until a wake-up succeeds, and its plan stays."""
        if options.kv_on_update not in ("keep", "recompute"):
            raise ConfigError(
                f"kv_on_update is {options.kv_on_update!r}",
                where="rollout.kv_on_update",
                fix="Set keep or recompute",
            )
        self.backend = backend  # display name of the backend
        self.num_steps = 0
        self.tokens_generated = 0
        self.busy_s = 0.0
        self.compute_s = 0.0  # the model's part of busy_s
        self.next_step_delay_s = 0.0
        self.tokens_computed = 0  # tokens through the model, sampled or given, without shared ones
        self.tensor_parallel_size = 1
        self._slots, self._compute, self._paged_cache = slots, compute, paged_cache
        self._config, self._tensor_shapes, self._options = (
            config,
            get_tensor_shapes(config),
            options,
        )
        self._clock = options.clock or SystemClock()
        self._recompute_on_update = options.kv_on_update == "recompute"
        self._stop_checker = StopStringChecker(options.decode_tokens)
        self._queue: dict[int, GenerationRequest] = {}  # waiting for a slot, by id, in order
        self._weights = LoadedWeights(slots)
        about = slots, compute, paged_cache, self._weights, self._stop_checker, self._clock
        self.scheduler = BatchScheduler(*about, allow_mixed_versions=not self._recompute_on_update)
        loads = self.scheduler.prefix_loads
        self.expect_load, self.offer_load, self.offload_all = (
            loads.expect_load,
            loads.offer_load,
            loads.offload_all,
        )
        self._is_paused = False
        # From `collect_cache` to the next step, requests do not take slots: that may copy a block.
        self._defers_requests = False
        self._is_cache_released = False
        self.cannot_copy_memory = self.keeps_weights = False
        self.min_slice_s = 0.0
        self.cache_plan: CachePlan | None = None  # None before the first wake-up
        self._plan_cache = plan_cache

    @property
    def version(self) -> int:
        """Version of the loaded weights; NO_VERSION if there is no complete one."""
        return self._weights.version

    @property
    def num_preempted(self) -> int:
        """Number of times that a request lost its cache to older ones."""
        return self.scheduler.num_preempted

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    @property
    def has_finished(self) -> bool:
        """True if a request has finished since the last drain."""
        return self._slots.has_finished

    @property
    def adapter_versions(self) -> Mapping[str, int]:
        """Versions of the loaded adapters, by name."""
        return self._weights.adapters

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed per second, as measured recently; 0: not measured yet."""
        return self.scheduler.prefill_rate.tokens_per_s

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds; 0 before the first wake-up."""
        return self.cache_plan.num_tokens if self.cache_plan else 0

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0: they cannot be moved."""
        return self._compute.cache_bytes_per_token

    @property
    def cache_size_bytes(self) -> int:
        """Bytes of the cache's memory; 0 before the first wake-up."""
        return self.cache_tokens * self.cache_bytes_per_token

    @property
    def prefix_store(self) -> PrefixStore | None:
        """Store of offloaded caches, or None."""
        return self.scheduler.prefix_loads.store

    @prefix_store.setter
    def prefix_store(self, prefixes: PrefixStore | None) -> None:
        self.scheduler.prefix_loads.store = prefixes

    @property
    def cache_layout(self) -> str:
        """Layout of keys and values in copies of the cache.

        Engines of equal layout can use them.
        """
        return self._compute.cache_layout

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit all requests or none; Refused names one that cannot run.

        Ids that are in work are ignored.
        """
        for request in requests:
            check_request(
                request,
                self._compute.vocab_size,
                self._weights.adapter_indices,
                self._config.absent_ids,
            )
            self._stop_checker.check_request(request)
        for request in requests:
            if request.id in self._queue or request.id in self._slots:
                continue
            if request.max_new_tokens < 1 or len(request.tokens) >= self._slots.max_length:
                self._slots.finish_without_slot(request.id, FinishReason.LENGTH)
            elif self._stop_checker.has_stopped(request):
                self._slots.finish_without_slot(request.id, FinishReason.STOP)
            elif self._slots.has_idle_session(request.session) and not self._defers_requests:
                self.scheduler.start_request(request)
            else:
                self._queue[request.id] = request

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests with ABORTED; skip ids that are not in work."""
        for request_id in ids:
            slot = self._slots.find_slot(request_id)
            if slot is not None:
                self.scheduler.finish_request(slot, FinishReason.ABORTED)
            elif self._queue.pop(request_id, None):
                self._slots.finish_without_slot(request_id, FinishReason.ABORTED)

    def release_sessions(self, sessions: Iterable[int]) -> None:
        """Free the slots and blocks of ended sessions."""
        released = list(sessions)
        for slot in self._slots.release_sessions(released):
            self._paged_cache.free_slot(slot)
        self.scheduler.prefix_loads.release_sessions(released)

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        """Implement `TokenEngine.drain_outputs`."""
        return self._slots.drain_outputs(finished_only)

    def pause(self) -> None:
        """Make `step` do nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Let `step` run again after `pause`."""
        self._is_paused = False

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step of the batch, or several if no request joins.

        Return False if the engine is paused, asleep or quarantined, or has no work.
        """
        if self._is_paused or not self._weights.is_ready:
            return False
        began = self._clock.monotonic()
        self._defers_requests = False
        while self._queue and self._slots.has_available_slot():
            self.scheduler.start_request(self._queue.pop(next(iter(self._queue))))
        self.scheduler.prefix_loads.place_received_chunks()
        schedule = self.scheduler
        steps = 1 if schedule.prefill_slots or self._stop_checker else self._options.max_steps
        schedule.reserve_decode_blocks(steps)
        if schedule.prefill_slots:  # a request was preempted: blocks are only reserved for one step
            steps = 1
        joining, counts = schedule.plan_prefill()
        rows = schedule.decode_slots
        if not len(rows) and not joining:
            return False
        self._run_step(rows, joining, counts, 1 if joining else steps)
        self.busy_s += self._clock.monotonic() - began
        return True

    def _run_step(
        self, rows: NDArray[np.int64], joining: list[int], stretches: list[int], steps: int
    ) -> None:
        slots, schedule = self._slots, self.scheduler
        counts = np.ones(len(rows) + len(joining), np.int64)
        if joining:
            counts[len(rows) :] = stretches
            rows = np.concatenate((rows, np.array(joining, np.int64)))
        before, computed = slots.num_tokens[rows], slots.num_computed_tokens[rows]
        began = self._clock.monotonic()
        sampled = self._compute.run_steps(rows, counts, steps, self._options.step_budget_s)
        took = self._clock.monotonic() - began
        self.compute_s += took
        if joining:
            schedule.prefill_rate.add_step(sum(stretches), int(counts.sum()), took)
        self.tokens_generated += sampled
        self.num_steps += max(1, sampled // len(rows))
        self.tokens_computed += int((slots.num_computed_tokens[rows] - computed).sum())
        grew = slots.num_tokens[rows] > before
        first = slots.first_sampled_index[rows]
        slots.first_sampled_index[rows] = np.where(grew, np.minimum(first, before), first)
        for slot in joining:
            self._paged_cache.publish_prefix(slot, include_tail=True)
            schedule.prefix_loads.skip_loaded_tokens(slot)
            ahead = slots.num_tokens[slot] - slots.num_computed_tokens[slot]
            if ahead < MIN_PREFILL_TOKENS and slot not in schedule.prefix_loads:
                schedule.set_prefilling(slot, False)
                schedule.prefix_loads.offload(slot, is_evicted=False)
        if self._stop_checker:
            self._stop_checker.check_slots(slots)
        for slot in rows[slots.finish_reason[rows] != FinishReason.RUNNING].tolist():
            self.scheduler.finish_request(slot, FinishReason(slots.finish_reason[slot]))

    # -- sessions that move ----------------------------------------------------------------------

    def describe_session_cache(self, session: int) -> SessionCache | None:
        """Implement `TokenEngine.describe_session_cache`."""
        slot = self._slots.find_idle_slot(session)
        if slot is None or not self._weights.is_ready:
            return None
        adapter = self._weights.get_adapter_name(int(self._slots.adapter_index[slot]))
        return describe_cache(self._slots, slot, self._compute.cache_layout, adapter)

    def copy_session_cache(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """Implement `TokenEngine.copy_session_cache`."""
        slot = self._slots.find_idle_slot(session)
        if (
            slot is None
            or not self._weights.is_ready
            or self._slots.num_computed_tokens[slot] < end
        ):
            return None
        return self._compute.read_cache(slot, start, end)

    # -- weights ---------------------------------------------------------------------------------

    def quarantine(self) -> None:
        """Compute nothing until a complete version is loaded."""
        self._weights.version = NO_VERSION

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load new weights; retain the slots' caches unless the engine is set to recompute.

        A cache without a token that was sampled here is dropped in any case: see
        `Slots.find_slots_without_samples`.
        """
        check_shapes(state, self._tensor_shapes)
        self._load_weights(state, version)

    def _load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        if not self._weights.is_asleep:
            with quarantine_on_error(version, self.quarantine):
                self._compute.load_weights(state)
                if self._options.verify_weights and (
                    odd := self._compute.find_differing_weights(state)
                ):
                    raise CorruptData(f"{len(odd)} tensors differ from the stored ones: {odd[0]}")
        # Pending loads are of the earlier weights.
        self._cancel_loads(list(self.scheduler.prefix_loads.active_loads))
        self._weights.set_base_version(version)
        self._paged_cache.clear_prefixes()
        # An adapter retains its version, so its tokens would not show the change.
        self.scheduler.drop_caches((self._slots.adapter_index > 0) | self._find_outdated_slots())

    def _cancel_loads(self, slots: list[int]) -> None:
        """Cancel the prefix loads of these slots and all offers."""
        for slot in slots:
            self.scheduler.drop_cache(slot, offload=False)
        self.scheduler.prefix_loads.withdraw_all_offers()

    def _find_outdated_slots(self) -> NDArray[np.bool_]:
        """Return the mask of slots [slots] whose cache an update of the weights drops."""
        every = np.ones(self._slots.num_slots, np.bool_)
        return every if self._recompute_on_update else self._slots.find_slots_without_samples()

    # -- adapters --------------------------------------------------------------------------------

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """Load an adapter, or a new version of one, beside the base.

        Caches of its last version are treated as in `update_weights`. Raise Refused if it does not
        fit or no index is free; Quarantined if loading broke off, and then the engine computes
        nothing until the adapter is loaded as a whole.
        """
        changes = build_adapter_deltas(self._config, tensors, scale)
        place = self._weights.choose_adapter_index(name)

        def quarantine() -> None:
            if name in self._weights.adapter_indices:
                self._weights.incomplete_adapters.add(place)
            else:
                self._compute.drop_adapter(place)

        with quarantine_on_error(version, quarantine):
            self._compute.load_adapter(place, changes)
        self._weights.set_adapter_version(name, place, version)
        under_way = self.scheduler.prefix_loads.active_loads
        self._cancel_loads([i for i in under_way if self._slots.adapter_index[i] == place])
        self.scheduler.drop_caches(
            (self._slots.adapter_index == place) & self._find_outdated_slots()
        )

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; raise Refused while requests use it."""
        place = self._weights.adapter_indices.get(name)
        if not place:
            return
        slots = self._slots
        waits = any(request.adapter == name for request in self._queue.values())
        if waits or (slots.adapter_index[slots.list_running_slots()] == place).any():
            raise adapter_in_use_error(name)
        for slot in np.flatnonzero(slots.adapter_index == place).tolist():
            self.scheduler.drop_cache(slot, offload=False)
            # another adapter may get this index, and must not match this cache
            slots.adapter_index[slot] = 0
        self._compute.drop_adapter(place)
        self.scheduler.prefix_loads.withdraw_all_offers()
        self._weights.remove_adapter(name)

    def end_slice(self) -> None:
        """Do nothing, because only `step` computes."""

    def collect_weights(self) -> ReleasableMemory:
        """Return the memory of the weights; no step may run while it is freed."""
        return self._compute.collect_weights()

    def collect_cache(self) -> ReleasableMemory:
        """Return the memory of the cache, with the blocks in use; no step may run while it is
        freed.
        """
        block_bytes = BLOCK_TOKENS * self._compute.cache_bytes_per_token
        used = self._paged_cache.used_blocks
        self._defers_requests = True
        num_blocks = self._paged_cache.block_pool.num_blocks
        return CacheMemory(self._compute, used, block_bytes, num_blocks, self._set_cache_released)

    def _set_cache_released(self, is_released: bool) -> None:
        self._is_cache_released = is_released

    def forget_cache(self) -> None:
        """Let running requests compute the cache again, because its content is lost."""
        self._is_cache_released = False
        for slot in range(self._slots.num_slots):
            self.scheduler.drop_cache(slot, offload=False)
        self._paged_cache.clear_prefixes()
        self.scheduler.recompute(np.ones(self._slots.num_slots, np.bool_))

    @property
    def running_cache_tokens(self) -> int:
        """Tokens of running requests whose keys and values are cached."""
        rows = self._slots.list_running_slots()
        return int(self._slots.num_computed_tokens[rows].sum())

    def sleep(self) -> None:
        """Free weights and cache; known tokens stay, and are computed again after wake-up."""
        if self._weights.is_asleep:
            return
        self._weights.is_asleep = True
        if not self._is_cache_released:
            self.offload_all()
        self.forget_cache()
        self._compute.sleep()

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        """Allocate the memory that `sleep` freed and load weights of `version`.

        Raise Refused if their shapes differ, ConfigError if memory is too small for one sequence,
        and MeshError if an allocation fails. The engine is still asleep then.
        """
        check_shapes(state, self._tensor_shapes)
        if self._weights.is_asleep:
            plan = self.cache_plan or self._plan_cache()
            self._compute.wake(plan.num_blocks)
            if self.cache_plan is None:  # one that does not fit is planned again the next time
                self._paged_cache.resize(plan.num_blocks)
                self.cache_plan = plan
            self._weights.is_asleep = False
        self._load_weights(state, version)

    def score(self, tokens: IntArray, adapter: str = "") -> NDArray[np.float32]:
        """Return log-probabilities at temperature 1 of all tokens but the first: float32 [n - 1].

        Raise Refused if the engine sleeps or the sequence does not fit.
        """
        row = np.asarray(tokens, np.int32)
        request = GenerationRequest(-1, row, 0, 1.0, (), 0, -1, adapter=adapter)
        check_request(
            request,
            self._compute.vocab_size,
            self._weights.adapter_indices,
            self._config.absent_ids,
        )
        if not self._weights.is_ready:
            raise no_weights_error()
        if len(tokens) > self._slots.max_length:
            raise sequence_too_long_error(len(tokens), self._slots.max_length)
        blocks = self.scheduler.borrow_blocks(len(tokens))
        if blocks is None:
            raise Refused(
                f"{len(tokens)} tokens do not fit the cache",
                where="engine",
                fix="Raise rollout.kv_memory or rollout.kv_tokens",
            )
        try:
            return self._compute.score(row, blocks, self._weights.adapter_indices[adapter])
        finally:
            self._paged_cache.return_blocks(blocks)
