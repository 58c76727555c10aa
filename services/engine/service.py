"""Actor of an engine process: accepts requests of rollout shards and streams tokens back.

A driver calls `run_once` in a loop: a thread if the engine computes, a task if it is simulated.
Each call runs the queued commands and one step, and sends the tokens that are due for a flush.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from meshrl.common.api.calls.interface import ChangeHint
from meshrl.common.api.calls.role import SetTier, TierUsage
from meshrl.common.api.engine import (
    AbortRequests,
    AttachStream,
    CacheFrame,
    CacheMove,
    CacheMoveResult,
    ChunkLookup,
    ChunkLookupResult,
    Engine,
    ExportCache,
    SubmitRequests,
    TokenBatch,
)
from meshrl.common.api.stats import EngineStats, KVStats
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.generation.engine_contract import GenerationRequest, SteppableEngine, TokenEngine
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.tiers import TierController
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call, cast, stream
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import RetryPolicy
from meshrl.services.engine.engine_kinds import ENGINE_KINDS, SLICE_KINDS, EngineKinds
from meshrl.services.engine.kv.cache_moves import CacheMoves
from meshrl.services.engine.kv.chunk_files import NAME_BYTES
from meshrl.services.engine.kv.departure import Departure, read_call_time_s
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.measurement.curve import CurveFit
from meshrl.services.engine.measurement.throughput import ContextLengths, Throughput
from meshrl.services.engine.measurement.update_pauses import UpdatePauses
from meshrl.services.engine.stepping.commands import StepCommands
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.services.engine.stepping.shard_streams import AttachedShard, ShardStreams
from meshrl.services.engine.weights.engine_weights import EngineSleeper, EngineWeights

FLUSH_STEPS = 8
FLUSH_S = 0.02  # tokens leave after 8 steps or 20 ms, at once when a request ends
DRAIN_TIMEOUT_S = 3.0  # to send the last tokens
DRAIN_POLL_S = 0.01
DRAIN_RESERVE_S = 5.0  # of the drain call's time, for everything but caches that leave
LOOK_UP_TIMEOUT_S = 4.0  # to look up chunks on the host's tiers for another host
LOAD_RETRY_S = 1.0  # until tensors that could not be loaded in a time slice are tried again
OFFLOAD_TIMEOUT_S = 1.0  # to offload caches for the host's other engines


class EngineService(KindCallsMixin):
    """Service of one engine for any number of shards."""

    interface = Engine

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        call_on_loop: Callable[[Callable[[], None]], None],
        *,
        time_slices: SliceClient | None = None,
        emulation: EmulatedSteps | None = None,
    ) -> None:
        """Initialize the service.

        `call_on_loop` runs a function on the loop, from the driver's side. `time_slices` is the
        client of the gang's time slices; None: the engine has the accelerator alone. `emulation`:
        the engine's steps at a declared speed; None: the engine runs at its own speed.
        """
        self.host_cache: HostCache | None = None
        self.mesh, self.engine, self.time_slices = mesh, engine, time_slices
        self.emulation = emulation
        self.steps: SteppableEngine = emulation or engine
        self.throughput, self.curve_fit, self.context_lengths = (
            Throughput(),
            CurveFit(),
            ContextLengths(),
        )
        self.occupancy = Occupancy(mesh.clock.monotonic)
        self.pauses = UpdatePauses(mesh.clock)
        self.commands = StepCommands(mesh.clock, call_on_loop)
        self.shard_streams = ShardStreams(mesh.name, lambda: self.weights.lineage_and_version)
        parts = self.commands, self.shard_streams, self.pauses
        self.weights = EngineWeights(mesh, engine, *parts, time_slices)
        self.draining = self.is_leaving = False  # leaving: requests still run
        self._flushed_step = 0
        self._flushed_at_s = 0.0
        between = partial(self.commands.run_between_steps, needs_slice=True)
        named, wake = lambda: self.weights.computing_manifest, self.commands.wake_event.set
        self.cache_moves = CacheMoves(
            mesh, engine, self.steps, between, named, wake, self.commands.enqueue
        )
        if time_slices is not None and time_slices.is_enabled:
            engine.end_slice()  # nothing computes before the first time slice
        about = mesh, engine, self.weights, self.commands, time_slices
        self.kinds = EngineKinds(*about).controller
        self.weights.on_install = self._mark_changed
        sleeper = EngineSleeper(mesh, engine, self.commands, self.weights, self.kinds)
        self.tiers = TierController(
            mesh, sleeper, self.kinds, set_time_slicing=self.set_time_slicing
        )

    # -- driver side -----------------------------------------------------------------------------

    def run_once(self) -> bool:
        """Run one iteration of the driver's loop; return False if there was nothing to do."""
        self.run_commands(in_slice=True)
        running, before = self.engine.num_running, self.engine.tokens_generated
        busy_s, steps = self.steps.busy_s, self.engine.num_steps
        computed, context = self.engine.tokens_computed, self.context_lengths.mean_tokens
        busy = self.steps.step()
        now = self.mesh.clock.monotonic()
        sampled = self.engine.tokens_generated - before
        took_s = self.steps.busy_s - busy_s
        steps = self.engine.num_steps - steps
        prefilled = max(0, self.engine.tokens_computed - computed - sampled)
        self.throughput.add_steps(running, sampled, took_s, context)
        batch = sampled / steps if steps else 0.0
        self.curve_fit.add_steps(steps, sampled, context * batch, prefilled, took_s)
        self.pauses.add_steps(steps, took_s)
        self.occupancy.set_count("running", self.engine.num_running)
        self.occupancy.set_count("waiting", self.engine.num_waiting)
        self._flush(now, busy)
        return busy or self.commands.has_commands

    def use_host_cache(self, host_cache: HostCache) -> None:
        self.host_cache = self.weights.host_cache = host_cache

    def run_commands(self, in_slice: bool) -> None:
        """Run queued commands in order.

        Without a time slice, stop at the first one that needs it.
        """
        if self.commands.run(in_slice) and not in_slice:
            self.flush()

    @property
    def slice_function(self) -> str:
        """Name of the function that needs a time slice; empty: there is nothing to compute."""
        if self.commands.needs_slice:
            return "sync"
        able = self.engine.version >= 0 and not self.weights.is_asleep
        return "generate" if able and (self.engine.num_running or self.engine.num_waiting) else ""

    def flush(self) -> None:
        self._flush(self.mesh.clock.monotonic(), False)

    def _flush(self, now: float, busy: bool) -> None:
        many = self.engine.num_steps - self._flushed_step >= FLUSH_STEPS
        due = many or now - self._flushed_at_s >= FLUSH_S or not busy
        if due:
            self._flushed_step, self._flushed_at_s = self.engine.num_steps, now
        if due or self.steps.has_finished:
            flush = self.steps.drain_outputs(finished_only=not due)
            if flush is not None:
                self.context_lengths.add_flush(flush)
                self.commands.call_on_loop(lambda: self.shard_streams.route(flush))

    def admit(self, requests: list[GenerationRequest], ended_sessions: list[int]) -> None:
        if ended_sessions:
            self.engine.release_sessions(ended_sessions)
        for request in requests:
            request.adapter = request.adapter or self.weights.default_adapter
        try:
            self.engine.submit(requests)
            self.context_lengths.add_requests(requests)
        except Refused as error:
            self.commands.call_on_loop(partial(self._reject, [r.id for r in requests], error))

    def stats(self) -> EngineStats:
        engine, steps, emulated = self.engine, self.steps, self.emulation
        curve = self.curve_fit.get_curve("", steps.tensor_parallel_size)
        if curve is not None:
            curve = replace(curve, max_tokens_per_s=self.throughput.max_tokens_per_s)
        return EngineStats(
            **self.pauses.stats.encode(),
            ready=not self.draining or self.is_leaving,
            leaving=self.is_leaving,
            version=self.weights.version,
            tokens=engine.tokens_generated,
            busy_s=steps.busy_s,
            running=engine.num_running,
            waiting=engine.num_waiting,
            requests=self.shard_streams.request_counts,
            plateau=self.throughput.plateau_batch,
            backend=steps.backend,
            tensor_parallel=steps.tensor_parallel_size,
            time_sliced=self.time_slices is not None and self.time_slices.is_enabled,
            preempted=engine.num_preempted,
            cache_tokens=engine.cache_tokens,
            prefill_tokens_per_s=steps.prefill_tokens_per_s,
            cache_bytes_per_token=engine.cache_bytes_per_token,
            start_s=round(self.weights.start_s, 3),
            throughput=self.throughput.tokens_per_s_by_context,
            context=round(self.context_lengths.mean_tokens, 1),
            running_s=round(self.occupancy.read_seconds("running"), 3),
            waiting_s=round(self.occupancy.read_seconds("waiting"), 3),
            decode_curve=curve.encode() if curve is not None else None,
            kv=self._collect_kv_stats(),
            emulated_count=emulated.emulated_count if emulated is not None else None,
            late_count=emulated.late_count if emulated is not None else None,
            tokens_cached=getattr(engine, "tokens_cached", None),
            server_transport=self.weights.server_transport,
        )

    def _collect_kv_stats(self) -> KVStats | None:
        """Collect the published counters of loaded keys and values.

        None if the engine loads none.
        """
        found = self.host_cache.stats() if self.host_cache is not None else None
        moves = self.cache_moves
        if moves.received_tokens:
            rate, found = self.steps.prefill_tokens_per_s, found or KVStats()
            found.loaded_tokens["engines"], found.bytes_in["engines"] = (
                moves.received_tokens,
                moves.received_bytes,
            )
            found.saved_s = round(
                found.saved_s + (moves.received_tokens / rate if rate else 0.0), 3
            )
        return found

    # -- loop side -------------------------------------------------------------------------------

    @stream(Engine.attach)
    async def attach(self, request: AttachStream) -> AsyncIterator[TokenBatch]:
        self._check_not_draining()
        if (previous := self.shard_streams.find_shard(request.owner)) is not None:
            self._detach(previous)
        owner = self.shard_streams.attach(request)
        try:
            while (flush := await owner.flushes.get()) is not None:
                yield flush
        finally:
            self._detach(owner)

    def _detach(self, owner: AttachedShard) -> None:
        """Abort all running requests of a detached owner."""
        if ids := self.shard_streams.detach(owner):
            self.commands.enqueue(lambda: self.engine.abort(ids))

    @call(Engine.submit)
    def submit(self, batch: SubmitRequests) -> None:
        owner = self.shard_streams.require_shard(batch.owner, batch.incarnation)
        self._check_not_draining()
        requests, ended_sessions = self._build_requests(owner, batch), batch.ended_sessions.tolist()
        self.commands.enqueue(lambda: self.admit(requests, ended_sessions))

    def _build_requests(
        self, owner: AttachedShard, batch: SubmitRequests
    ) -> list[GenerationRequest]:
        how = batch.sampling
        stop, stop_text = tuple(how.stop_token_ids), tuple(how.stop_strings)
        ends = np.cumsum(batch.lengths)
        columns = zip(
            batch.request_ids.tolist(),
            batch.sessions.tolist(),
            (ends - batch.lengths).tolist(),
            ends.tolist(),
            batch.turn_starts.tolist(),
            batch.max_new_tokens.tolist(),
            batch.temperature.tolist(),
            batch.top_p.tolist(),
            batch.seeds.tolist(),
            strict=True,
        )
        return [
            GenerationRequest(
                id=self.shard_streams.register_request(owner, identity),
                tokens=batch.tokens[start:end],
                max_new_tokens=most,
                temperature=temperature,
                stop_ids=stop,
                seed=seed,
                session=session,
                top_p=top_p,
                top_k=how.top_k,
                min_p=how.min_p,
                adjustments=how.adjustments,
                stop_strings=stop_text,
                turn_start=begin,
                wants_raw_logprobs=how.wants_raw_logprobs,
                adapter=how.adapter,
            )
            for identity, session, start, end, begin, most, temperature, top_p, seed in columns
        ]

    def _check_not_draining(self) -> None:
        if self.draining:
            raise Refused("the engine is draining", where=self.mesh.name, fix="Call another engine")

    def _reject(self, ids: list[int], error: Refused) -> None:
        """End requests that the engine cannot serve as aborted, and log the reason."""
        self.mesh.telemetry.log.error("requests rejected", error=str(error))
        self.shard_streams.reject(ids)

    @cast(Engine.abort)
    def abort(self, request: AbortRequests) -> None:
        owner = self.shard_streams.find_shard(request.owner)
        if owner is not None:
            ids = [
                owner.engine_ids[i] for i in request.request_ids.tolist() if i in owner.engine_ids
            ]
            self.commands.enqueue(lambda: self.engine.abort(ids))

    async def set_time_slicing(self, enabled: bool) -> None:
        """Set if other instances of the gang compute in time slices.

        Return once the setting is in force, at the end of the running step.
        """
        if self.time_slices is not None and enabled != self.time_slices.is_enabled:
            if not enabled:
                await self.kinds.load()
                self._mark_changed()
            await self.time_slices.set_enabled(enabled)
            await self.commands.run_between_steps(
                self.engine.end_slice if enabled else lambda: None,
                "the engine's switch of time slicing",
            )

    def _mark_changed(self) -> None:
        """Record that weights and cache may differ from their copies."""
        self.kinds.mark_changed(ENGINE_KINDS)

    async def begin_slice(self, time_slices: SliceClient, function: str) -> int:
        """Acquire a time slice with the kinds of a function; return its ticket for `end_slice`.

        Kinds that cannot be loaded now are tried again in later slices, within the bound of
        `RetryPolicy`.
        """
        kinds, changed = SLICE_KINDS[function]
        patience = RetryPolicy(self.mesh.clock)
        try:
            while True:
                ticket = await time_slices.acquire_slice(function, kinds=kinds)
                try:
                    await self.kinds.begin_use(kinds, changed)
                    return ticket
                except BaseException as error:
                    time_slices.release_slice(ticket, function, 0.0)
                    if not isinstance(error, MeshError):
                        raise
                    patience.record_failure(error)
                await self.mesh.clock.sleep(LOAD_RETRY_S)
        finally:
            patience.close()

    def end_slice(
        self, time_slices: SliceClient, ticket: int, function: str, duration_s: float
    ) -> None:
        """Release a time slice after `duration_s` seconds."""
        self.kinds.end_use(SLICE_KINDS[function][0])
        time_slices.release_slice(ticket, function, duration_s)

    @call(Engine.set_tier)
    async def set_tier(self, desired: SetTier) -> TierUsage:
        return await self.tiers.set_tier(desired)

    @call(Engine.move_cache)
    async def move_cache(self, request: CacheMove) -> CacheMoveResult:
        """Move a session's cache here from another engine as far as possible.

        Never raise an error.
        """
        if self.draining or self.shard_streams.find_shard(request.owner) is None:
            return CacheMoveResult(0, 0, 0.0, False)
        return await self.cache_moves.fetch_cache(request)

    @stream(Engine.export_cache)
    async def export_cache(self, request: ExportCache) -> AsyncIterator[CacheFrame]:
        async with aclosing(self.cache_moves.stream_frames(request)) as frames:
            async for frame in frames:
                yield frame

    @call(Engine.look_up_chunks)
    async def look_up_chunks(self, request: ChunkLookup) -> ChunkLookupResult:
        """Return which chunks of a prefix are on this host's KV tiers, and reserve them for a
        while.
        """
        there = np.zeros(request.chunk_names.nbytes // NAME_BYTES, np.bool_)
        if self.host_cache is not None:
            look = partial(self.host_cache.look_up_chunks, request)
            there = await self.mesh.host.run_blocking(look, deadline_s=LOOK_UP_TIMEOUT_S)
        return ChunkLookupResult(there)

    async def stop(self) -> None:
        await self.tiers.stop()

    @cast(Engine.notify_change)
    def notify_change(self, hint: ChangeHint) -> None:
        self.weights.change_event.set()

    @call(Engine.drain)
    async def drain(self, request: str) -> None:
        """Accept no more requests; end running ones as aborted, with all their tokens delivered.

        With time until the call's deadline, caches leave with their requests first.
        """
        self.draining = True
        leave_s = read_call_time_s(self.mesh.clock) - DRAIN_RESERVE_S
        if leave_s > 0 and self.engine.cache_bytes_per_token:
            await self._move_requests_away(leave_s)
        ids = self.shard_streams.open_requests
        self.commands.enqueue(lambda: self.engine.abort(ids))
        async with self.mesh.clock.timeout(DRAIN_TIMEOUT_S, "sending the last tokens"):
            while self.shard_streams.open_requests:
                await self.mesh.clock.sleep(DRAIN_POLL_S)
        self.shard_streams.close()
        if (kv := self.host_cache) is not None:  # offload caches for the host's other engines
            with suppress(MeshError):
                await self.commands.run_between_steps(
                    kv.offload_all, "offloading caches", OFFLOAD_TIMEOUT_S / 2, needs_slice=True
                )
                flush = partial(kv.writer.flush, OFFLOAD_TIMEOUT_S / 2)
                await self.mesh.host.run_blocking(flush, deadline_s=OFFLOAD_TIMEOUT_S)

    async def _move_requests_away(self, limit_s: float) -> None:
        self.is_leaving = True
        try:
            await Departure(
                self.mesh.clock,
                self.cache_moves,
                self.engine.cache_bytes_per_token,
                lambda: self.steps.prefill_tokens_per_s,
                self.context_lengths.list_requests,
                lambda ids: self.commands.enqueue(lambda: self.engine.abort(ids)),
            ).run(limit_s)
        finally:
            self.is_leaving = False
