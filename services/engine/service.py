"""The actor of an engine process: takes requests of rollout shards, streams tokens back.

The engine itself is driven from elsewhere (a thread where it computes, a task where it is
simulated): the driver calls `turn` in a loop, which runs what was asked for since, one step, and
hands over what is to be flushed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from meshrl.common.api.calls.interface import Look
from meshrl.common.api.calls.role import Settle, Settled
from meshrl.common.api.engine import (
    Abort,
    Attach,
    CacheFrame,
    CacheMove,
    CacheMoved,
    Engine,
    Export,
    Shelved,
    Stored,
    Submit,
    Tokens,
)
from meshrl.common.api.stats import EngineStats, KVStats
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.generation.contract import EngineSteps, Request, TokenEngine
from meshrl.common.mesh.residents.tiers import Tiers
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast, stream
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.kv.chunk_files import NAME_BYTES
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.moves import CacheMoves
from meshrl.services.engine.measurement.curve import CurveFit
from meshrl.services.engine.measurement.pauses import Pauses
from meshrl.services.engine.measurement.throughput import Contexts, Throughput
from meshrl.services.engine.stepping.commands import StepCommands
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.services.engine.stepping.shards import Attached, Shards
from meshrl.services.engine.weights.loaded import EngineSleeper, EngineWeights

FLUSH_STEPS = 8
FLUSH_S = 0.02  # tokens leave after 8 steps or 20 ms, at once when a request ends
DRAIN_S = 3.0  # for the last tokens to leave
DRAIN_LOOK_S = 0.01
STORED_S = 4.0  # to look at the host's shelves for another one
WRITTEN_S = 1.0  # for what was computed to be left to the host's other engines


class EngineService(Actor):
    """Serves one engine to any number of shards."""

    interface = Engine

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        deliver: Callable[[Callable[[], None]], None],
        cache_tokens: int = 0,
        *,
        turns: Turns | None = None,
        emulated: EmulatedSteps | None = None,
    ) -> None:
        """`deliver` runs a function on the loop, from the driver's side; `turns` are those with
        others of its gang, None: it has the accelerator alone. `emulated`: the engine's steps at a
        declared pace, None: they are taken at its own speed.
        """
        self.kv: HostCache | None = None
        self.mesh, self.engine, self.turns = mesh, engine, turns
        self.emulated = emulated
        self.steps: EngineSteps = emulated or engine
        self.throughput, self.fit, self.contexts = Throughput(), CurveFit(), Contexts()
        self.load = Occupancy(mesh.clock.monotonic)
        self.pauses = Pauses(mesh.clock)
        self.commands = StepCommands(mesh.clock, deliver)
        self.shards = Shards(mesh.name, lambda: self.weights.told)
        parts = self.commands, self.shards, self.pauses
        self.weights = EngineWeights(mesh, engine, *parts, turns)
        self.draining = False
        self._flushed_step = 0
        self._flushed_at = 0.0
        between = partial(self.commands.between_steps, needs_turn=True)
        named, wake = lambda: self.weights.computing, self.commands.wake.set
        self.moves = CacheMoves(mesh, engine, self.steps, between, named, wake, self.commands.give)
        sleeper = EngineSleeper(mesh, engine, self.commands, self.weights, cache_tokens)
        self.tiers = Tiers(mesh, sleeper, *mesh.settings.places, turns=self.take_turns)

    # -- the driver's side -----------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn of the driver's loop; False when there was nothing to do."""
        self.obey(in_turn=True)
        running, before = self.engine.running, self.engine.tokens_generated
        busy_s, steps = self.steps.busy_s, self.engine.steps
        computed, context = self.engine.tokens_computed, self.contexts.mean
        busy = self.steps.step()
        now = self.mesh.clock.monotonic()
        sampled = self.engine.tokens_generated - before
        took_s = self.steps.busy_s - busy_s
        steps = self.engine.steps - steps
        prefilled = max(0, self.engine.tokens_computed - computed - sampled)
        self.throughput.stepped(running, sampled, took_s, context)
        batch = sampled / steps if steps else 0.0
        self.fit.stepped(steps, sampled, context * batch, prefilled, took_s)
        self.pauses.stepped(steps, took_s)
        self.load.put("running", self.engine.running)
        self.load.put("waiting", self.engine.waiting)
        self._flush(now, busy)
        return busy or self.commands.some

    def use(self, kv: HostCache) -> None:
        self.kv = self.weights.kv = kv

    def obey(self, in_turn: bool) -> None:
        """Runs what was commanded, in order; without a turn, up to what needs one."""
        if self.commands.run(in_turn) and not in_turn:
            self.flush()

    @property
    def wants(self) -> str:
        """The function that it wants a turn for; empty: there is nothing to compute."""
        if self.commands.want_turn:
            return "sync"
        able = self.engine.version >= 0 and not self.weights.asleep
        return "generate" if able and (self.engine.running or self.engine.waiting) else ""

    def flush(self) -> None:
        self._flush(self.mesh.clock.monotonic(), False)

    def _flush(self, now: float, busy: bool) -> None:
        many = self.engine.steps - self._flushed_step >= FLUSH_STEPS
        due = many or now - self._flushed_at >= FLUSH_S or not busy
        if due:
            self._flushed_step, self._flushed_at = self.engine.steps, now
        if due or self.steps.ended:
            flush = self.steps.drain(ended_only=not due)
            if flush is not None:
                self.contexts.flushed(flush)
                self.commands.deliver(lambda: self.shards.route(flush))

    def admit(self, requests: list[Request], ended: list[int]) -> None:
        if ended:
            self.engine.release(ended)
        for request in requests:
            request.adapter = request.adapter or self.weights.adapter
        try:
            self.engine.submit(requests)
            self.contexts.submitted(requests)
        except Refused as error:
            self.commands.deliver(partial(self._refuse, [r.id for r in requests], error))

    def stats(self) -> EngineStats:
        engine, steps, emulated = self.engine, self.steps, self.emulated
        curve = self.fit.curve("", steps.tensor_parallel)
        if curve is not None:
            curve = replace(curve, most_tokens_per_s=self.throughput.most)
        return EngineStats(
            **self.pauses.stats.encoded(),
            ready=not self.draining,
            version=self.weights.version,
            tokens=engine.tokens_generated,
            busy_s=steps.busy_s,
            running=engine.running,
            waiting=engine.waiting,
            requests=self.shards.requests,
            plateau=self.throughput.plateau,
            path=steps.path,
            tensor_parallel=steps.tensor_parallel,
            preempted=engine.preempted,
            prefill_tokens_per_s=steps.prefill_tokens_per_s,
            cache_bytes_per_token=engine.cache_bytes_per_token,
            start_s=round(self.weights.start_s, 3),
            throughput=self.throughput.by_context,
            context=round(self.contexts.mean, 1),
            running_s=round(self.load.seconds("running"), 3),
            waiting_s=round(self.load.seconds("waiting"), 3),
            curve=curve.told() if curve is not None else None,
            kv=self._kept(),
            paced=emulated.paced if emulated is not None else None,
            late=emulated.late if emulated is not None else None,
            tokens_cached=getattr(engine, "tokens_cached", None),
        )

    def _kept(self) -> KVStats | None:
        """What it publishes of keys and values that it loaded; None: it loads none."""
        found = self.kv.stats() if self.kv is not None else None
        moves = self.moves
        if moves.tokens:
            rate, found = self.steps.prefill_tokens_per_s, found or KVStats()
            found.loaded["engines"], found.bytes_in["engines"] = moves.tokens, moves.bytes
            found.saved_s = round(found.saved_s + (moves.tokens / rate if rate else 0.0), 3)
        return found

    # -- the loop's side -------------------------------------------------------------------------

    @stream(Engine.attach)
    async def attach(self, request: Attach) -> AsyncIterator[Tokens]:
        self._refuse_new()
        if (previous := self.shards.listening(request.owner)) is not None:
            self._detach(previous)
        owner = self.shards.attach(request)
        try:
            while (flush := await owner.flushes.get()) is not None:
                yield flush
        finally:
            self._detach(owner)

    def _detach(self, owner: Attached) -> None:
        """Aborts what an owner that has gone still had running."""
        if ids := self.shards.detach(owner):
            self.commands.give(lambda: self.engine.abort(ids))

    @call(Engine.submit)
    def submit(self, batch: Submit) -> None:
        owner = self.shards.asking(batch.owner, batch.incarnation)
        self._refuse_new()
        requests, ended = self._requests(owner, batch), batch.ended.tolist()
        self.commands.give(lambda: self.admit(requests, ended))

    def _requests(self, owner: Attached, batch: Submit) -> list[Request]:
        how = batch.sampling
        stop, stop_text = tuple(how.stop), tuple(how.stop_text)
        ends = np.cumsum(batch.lengths)
        columns = zip(
            batch.ids.tolist(),
            batch.sessions.tolist(),
            (ends - batch.lengths).tolist(),
            ends.tolist(),
            batch.begins.tolist(),
            batch.max_new.tolist(),
            batch.temperature.tolist(),
            batch.seeds.tolist(),
            strict=True,
        )
        return [
            Request(
                id=self.shards.number(owner, identity),
                tokens=batch.tokens[start:end],
                max_new=most,
                temperature=temperature,
                stop_ids=stop,
                seed=seed,
                session=session,
                top_p=how.top_p,
                top_k=how.top_k,
                min_p=how.min_p,
                stop_text=stop_text,
                begin=begin,
                unmodified=how.unmodified,
                adapter=how.adapter,
            )
            for identity, session, start, end, begin, most, temperature, seed in columns
        ]

    def _refuse_new(self) -> None:
        if self.draining:
            raise Refused("the engine is draining", where=self.mesh.name, fix="ask another one")

    def _refuse(self, ids: list[int], error: Refused) -> None:
        """What the engine cannot serve ends as aborted, and the reason is logged."""
        self.mesh.telemetry.log.error("requests refused", error=str(error))
        self.shards.refuse(ids)

    @cast(Engine.abort)
    def abort(self, request: Abort) -> None:
        owner = self.shards.listening(request.owner)
        if owner is not None:
            ids = [owner.ids[i] for i in request.ids.tolist() if i in owner.ids]
            self.commands.give(lambda: self.engine.abort(ids))

    async def take_turns(self, enabled: bool) -> None:
        """Whether its gang has others that compute by turns with it. Returns when it keeps to it,
        at the end of the step in hand.
        """
        if self.turns is not None and enabled != self.turns.enabled:
            await self.turns.settle(enabled)
            await self.commands.between_steps(lambda: None, "the engine to take turns")

    @call(Engine.settle)
    async def settle(self, wish: Settle) -> Settled:
        return await self.tiers.settle(wish)

    @call(Engine.move)
    async def move(self, request: CacheMove) -> CacheMoved:
        """Has a session's cache come from another engine, as far as that goes; never an error."""
        if self.draining or self.shards.listening(request.owner) is None:
            return CacheMoved(0, 0, 0.0, False)
        return await self.moves.fetch(request)

    @stream(Engine.export)
    async def export(self, request: Export) -> AsyncIterator[CacheFrame]:
        async with aclosing(self.moves.frames(request)) as frames:
            async for frame in frames:
                yield frame

    @call(Engine.stored)
    async def stored(self, request: Stored) -> Shelved:
        """Which chunks of a prefix lie on this host's shelves, where they stay for a while."""
        there = np.zeros(request.names.nbytes // NAME_BYTES, np.bool_)
        if self.kv is not None:
            look = partial(self.kv.stored, request)
            there = await self.mesh.host.run_blocking(look, deadline_s=STORED_S)
        return Shelved(there)

    async def stop(self) -> None:
        await self.tiers.stop()

    @cast(Engine.look)
    def look(self, hint: Look) -> None:
        self.weights.changed.set()

    @call(Engine.drain)
    async def drain(self, request: str) -> None:
        """Takes nothing more; what runs ends as aborted, with every token so far delivered."""
        self.draining = True
        ids = self.shards.out
        self.commands.give(lambda: self.engine.abort(ids))
        async with self.mesh.clock.timeout(DRAIN_S, "the last tokens to leave"):
            while self.shards.out:
                await self.mesh.clock.sleep(DRAIN_LOOK_S)
        self.shards.end()
        if (kv := self.kv) is not None:  # what was computed is left to the host's other engines
            with suppress(MeshError):
                await self.commands.between_steps(
                    kv.keep_all, "caches to be kept", WRITTEN_S / 2, needs_turn=True
                )
                flush = partial(kv.writer.flush, WRITTEN_S / 2)
                await self.mesh.host.run_blocking(flush, deadline_s=WRITTEN_S)
