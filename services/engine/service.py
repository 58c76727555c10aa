"""The actor of an engine process: takes requests of rollout shards, streams tokens back, swaps
weights between two steps.

The engine itself is driven from elsewhere (a thread where it computes, a task where it is
simulated): the driver calls `turn` in a loop, which runs what was asked for since, one step, and
hands over what is to be flushed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from common.api.engine import (
    Abort,
    Attach,
    CacheFrame,
    CacheMove,
    CacheMoved,
    Engine,
    Export,
    Finish,
    Submit,
    Submitted,
    Tokens,
)
from common.api.hint import Look
from common.api.role import Drain, Drained, Settle, Settled
from common.api.turns import TURN_S
from common.errors import MeshError, Refused
from common.generation.contract import (
    NO_FLOATS,
    NO_VERSION,
    Flush,
    Quarantined,
    Request,
    TokenEngine,
    replacing,
)
from common.runtime.actor import Actor, call, cast, stream
from common.runtime.mesh import Mesh
from common.runtime.residents.tiers import Tiers
from common.runtime.residents.turns import Turns
from common.weights.images import outline
from services.engine.cache_moves import CacheMoves
from services.engine.pauses import Pauses
from services.engine.sleeping import EngineSleeper
from services.engine.throughput import Throughput

R = TypeVar("R")

FLUSH_STEPS = 8
SWAP_S = 60.0  # for what runs between two steps; with others on the gang, their turns come first
FLUSH_S = 0.02  # tokens leave after 8 steps or 20 ms, at once when a request ends


EMPTY = Flush(
    ids=np.zeros(0, np.int64),
    counts=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int32),
    logprobs=NO_FLOATS,
    unmodified=NO_FLOATS,
    versions=np.zeros(0, np.int32),
    finish=np.zeros(0, np.int8),
)


@dataclass(frozen=True)
class AdapterVersion:
    """A version of a job's adapters, and the weights that they are added to."""

    name: str  # by which requests ask for them
    version: int
    tensors: Mapping[str, Tensor]
    scale: float
    base: str  # manifest of the weights that they are added to
    base_version: int
    model: Mapping[str, Tensor] | None  # these weights; None: the engine has them


class Attached:
    """A shard that listens, and its requests that are out."""

    def __init__(self, attach: Attach) -> None:
        self.owner, self.incarnation = attach.owner, attach.incarnation
        self.flushes: asyncio.Queue[Tokens | None] = asyncio.Queue()
        self.ids: dict[int, int] = {}  # the owner's request -> the engine's


class EngineService(Actor):
    """Serves one engine to any number of shards."""

    interface = Engine

    def __init__(
        self,
        mesh: Mesh,
        engine: TokenEngine,
        slots: int,
        deliver: Callable[[Any], None],
        cache_tokens: int = 0,
        *,
        turns: Turns | None = None,
    ) -> None:
        self.mesh, self.engine = mesh, engine
        self._slots = slots
        self._turned_at = mesh.clock.monotonic()
        self.occupied_s = 0.0  # time that all slots together would have needed for what they did
        self.throughput = Throughput()
        self.pauses = Pauses(mesh.clock)
        self._deliver = deliver  # runs a function on the loop, from the driver's thread
        self._owners: dict[str, Attached] = {}
        self._routes: dict[int, tuple[Attached, int]] = {}  # the engine's request -> owner and id
        self._next = 0
        self.turns = turns  # with others of its gang; None: it has the accelerator alone
        self._commands: deque[tuple[Callable[[], None], bool]] = deque()  # and if it takes a turn
        self.wake = threading.Event()
        self.changed = asyncio.Event()
        self.draining = False
        self.woken = False  # and has no weights yet
        self.asleep = False  # by request: new versions are not fetched until it wakes
        self.loaded = asyncio.Event()  # weights, since it was woken
        self.weight_bytes = 0  # of what was loaded last, as it came
        self._model_bytes = 0  # the part of them that is no adapter's
        self._flushed_step = 0
        self._flushed_at = 0.0
        self.manifest = ""  # names the weights that are loaded
        self.base = (
            ""  # names those that the job's adapters lie beside; empty: they are no adapters
        )
        self._adapter = ""  # of its job, for requests that name none; as the driver's side knows it
        self.lineage = 0  # lineage of their version; never ahead of them
        self._computing = ""  # the same, as the driver's side knows it
        between = partial(self.between_steps, needs_turn=True)
        self.moves = CacheMoves(mesh, engine, between, lambda: self._computing)
        sleeper = EngineSleeper(self, cache_tokens)
        self.tiers = Tiers(mesh, sleeper, *mesh.settings.places, turns=self.take_turns)

    @property
    def requests(self) -> dict[str, int]:
        """How many are out, by shard."""
        return {name: len(owner.ids) for name, owner in self._owners.items()}

    # -- the driver's side -----------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn of the driver's loop; False when there was nothing to do."""
        self.obey(in_turn=True)
        running, before = self.engine.running, self.engine.tokens_generated
        busy_s, steps = self.engine.busy_s, self.engine.steps
        busy = self.engine.step()
        now = self.mesh.clock.monotonic()
        sampled = self.engine.tokens_generated - before
        took_s = self.engine.busy_s - busy_s
        self.throughput.stepped(running, sampled, took_s)
        self.pauses.stepped(self.engine.steps - steps, took_s)
        self.occupied_s += (now - self._turned_at) * running / self._slots
        self._turned_at = now
        self._flush(now, busy)
        return busy or bool(self._commands)

    def obey(self, in_turn: bool) -> None:
        """Runs what was commanded, in order; without a turn, up to what needs one."""
        did = False
        while self._commands and (in_turn or not self._commands[0][1]):
            self._commands.popleft()[0]()
            did = True
        if did and not in_turn:
            self.flush()

    @property
    def wants(self) -> str:
        """The function that it wants a turn for; empty: there is nothing to compute."""
        if any(needs_turn for _, needs_turn in self._commands):
            return "sync"
        able = self.engine.version >= 0 and not self.asleep
        return "generate" if able and (self.engine.running or self.engine.waiting) else ""

    def flush(self) -> None:
        """Hands over all that has come so far."""
        self._flush(self.mesh.clock.monotonic(), False)

    def _flush(self, now: float, busy: bool) -> None:
        many = self.engine.steps - self._flushed_step >= FLUSH_STEPS
        due = many or now - self._flushed_at >= FLUSH_S or not busy
        if due:
            self._flushed_step, self._flushed_at = self.engine.steps, now
        if due or self.engine.ended:
            flush = self.engine.drain(ended_only=not due)
            if flush is not None:
                self._deliver(lambda: self._route(flush))

    def command(self, action: Callable[[], None], needs_turn: bool = False) -> None:
        """Runs `action` on the driver's side before the next step; in a turn of the gang, if it
        computes or moves tensors.
        """
        self._commands.append((action, needs_turn))
        self.wake.set()

    # -- the loop's side -------------------------------------------------------------------------

    def _route(self, flush: Flush) -> None:
        """Cuts a flush by owner."""
        routes = [self._routes.get(i) for i in flush.ids.tolist()]
        owners = {route[0] for route in routes if route is not None}
        for owner in owners:
            mine = [route is not None and route[0] is owner for route in routes]
            owner.flushes.put_nowait(_cut(flush, routes, mine, *self._weights))
        for i in flush.ids[flush.finish != Finish.RUNNING].tolist():
            if (route := self._routes.pop(i, None)) is not None:
                route[0].ids.pop(route[1], None)

    @stream(Engine.attach)
    async def attach(self, request: Attach) -> AsyncIterator[Tokens]:
        if self.draining:
            raise Refused("the engine is draining", where=self.mesh.name, fix="ask another one")
        previous = self._owners.get(request.owner)
        if previous is not None:
            self._detach(previous)
        owner = self._owners[request.owner] = Attached(request)
        owner.flushes.put_nowait(_cut(EMPTY, [], [], *self._weights))
        try:
            while (flush := await owner.flushes.get()) is not None:
                yield flush
        finally:
            self._detach(owner)

    def _detach(self, owner: Attached) -> None:
        """Aborts what an owner that has gone still had running."""
        if self._owners.get(owner.owner) is owner:
            del self._owners[owner.owner]
        owner.flushes.put_nowait(None)
        ids = list(owner.ids.values())
        owner.ids.clear()
        for i in ids:
            self._routes.pop(i, None)
        if ids:
            self.command(lambda: self.engine.abort(ids))

    @call(Engine.submit)
    def submit(self, batch: Submit) -> Submitted:
        owner = self._owners.get(batch.owner)
        if owner is None or owner.incarnation != batch.incarnation:
            raise Refused(
                f"{batch.owner} is not attached", where=self.mesh.name, fix="attach first"
            )
        if self.draining:
            raise Refused("the engine is draining", where=self.mesh.name, fix="ask another one")
        requests = []
        how = batch.sampling
        stop, stop_text = tuple(how.stop), tuple(how.stop_text)
        ends = np.cumsum(batch.lengths).tolist()
        start = 0
        columns = zip(
            batch.ids.tolist(),
            batch.sessions.tolist(),
            ends,
            batch.begins.tolist(),
            batch.max_new.tolist(),
            batch.temperature.tolist(),
            batch.seeds.tolist(),
            strict=True,
        )
        for identity, session, end, begin, most, temperature, seed in columns:
            self._next += 1
            self._routes[self._next] = (owner, identity)
            owner.ids[identity] = self._next
            requests.append(
                Request(
                    id=self._next,
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
            )
            start = end
        ended = batch.ended.tolist()
        self.command(lambda: self._admit(requests, ended))
        return Submitted()

    def _admit(self, requests: list[Request], ended: list[int]) -> None:
        if ended:
            self.engine.release(ended)
        for request in requests:
            request.adapter = request.adapter or self._adapter
        try:
            self.engine.submit(requests)
        except Refused as error:
            self._deliver(partial(self._refuse, requests, error))

    def _refuse(self, requests: list[Request], error: Refused) -> None:
        """What the engine cannot serve ends as aborted, and the reason is logged."""
        self.mesh.telemetry.log.error("requests refused", error=str(error))
        n = len(requests)
        none = EMPTY
        self._route(
            Flush(
                ids=np.array([request.id for request in requests], np.int64),
                counts=np.zeros(n, np.int32),
                tokens=none.tokens,
                logprobs=none.logprobs,
                unmodified=none.unmodified,
                versions=none.versions,
                finish=np.full(n, Finish.ABORTED, np.int8),
            )
        )

    @cast(Engine.abort)
    def abort(self, request: Abort) -> None:
        owner = self._owners.get(request.owner)
        if owner is not None:
            ids = [owner.ids[i] for i in request.ids.tolist() if i in owner.ids]
            self.command(lambda: self.engine.abort(ids))

    async def swap(
        self, tensors: Mapping[str, Tensor], version: int, manifest: str, lineage: int = 0
    ) -> None:
        """Puts a version's weights in place between two steps; an engine without any wakes. One
        that sleeps by now is left alone.
        """
        others = list(self._routes) if self.base else []

        def put() -> None:
            if not self._adapter:
                return self._put_model(tensors, version)
            self.engine.abort(others)
            self._put_model(tensors, version)
            with replacing(version, self.engine.quarantine):
                self.engine.unload_adapter(self._adapter)
            self._adapter = ""

        if await self._applied(put, manifest):
            self.base, self._model_bytes = "", _bytes(tensors)
            self._entered(manifest, lineage, self._model_bytes)

    async def put_adapter(self, adapter: AdapterVersion, manifest: str, lineage: int) -> None:
        """Puts a version of the job's adapters in place beside their base, and before it the base
        where the engine has it not: see `has_base`. What is under way with other weights than the
        base's ends as aborted, and is asked for again.
        """
        others = [] if self.base else list(self._routes)

        def load() -> None:
            self.engine.load_adapter(adapter.name, adapter.tensors, adapter.scale, adapter.version)
            self._adapter = adapter.name

        def put() -> None:
            if adapter.model is None:
                return load()
            self.engine.abort(others)
            self._put_model(adapter.model, adapter.base_version)
            with replacing(adapter.version, self.engine.quarantine):  # else the bare base serves
                load()

        if await self._applied(put, manifest):
            if adapter.model is not None:
                self.base, self._model_bytes = adapter.base, _bytes(adapter.model)
            self._entered(manifest, lineage, self._model_bytes + _bytes(adapter.tensors))

    def has_base(self, manifest: str) -> bool:
        """Whether the weights of this manifest are what adapters lie beside."""
        return self.base == manifest and self.engine.version >= 0 and not self.woken

    def _put_model(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if self.engine.version < 0 or self.woken:
            self.engine.wake(tensors, version)
            self.woken = False
        else:
            self.engine.swap(tensors, version)

    async def _applied(self, apply: Callable[[], None], manifest: str) -> bool:
        """Has new weights put in place between two steps; False: the engine sleeps by now."""

        def put() -> bool:
            if self.asleep:
                return False
            try:
                with self.pauses.applying():
                    apply()
            except Quarantined:
                self._computing = ""
                self._deliver(self._quarantined)
                raise
            self._computing = manifest
            return True

        alone = self.turns is None or not self.turns.enabled
        within_s = SWAP_S if alone else TURN_S
        what = "the engine to take new weights"
        return await self.between_steps(put, what, within_s, needs_turn=True)

    def _entered(self, manifest: str, lineage: int, weight_bytes: int) -> None:
        self.manifest, self.weight_bytes = manifest, weight_bytes
        self.loaded.set()
        self.enter(lineage)

    def enter(self, lineage: int) -> None:
        """The weights that are loaded are of this lineage: shards hear of them."""
        self.lineage = lineage
        self._tell_weights()

    def _quarantined(self) -> None:
        """Nobody knows what it holds: `follow` asks for a whole version again, and shards hear that
        it has none.
        """
        self.manifest = ""
        self.mesh.telemetry.count("engine_quarantined")
        self._tell_weights()

    def _tell_weights(self) -> None:
        for owner in self._owners.values():
            owner.flushes.put_nowait(_cut(EMPTY, [], [], *self._weights))

    @property
    def version(self) -> int:
        """The job's version that it computes with; NO_VERSION: with none that is whole."""
        if not self._adapter or self.engine.version < 0:
            return self.engine.version
        return self.engine.adapters.get(self._adapter, NO_VERSION)

    @property
    def _weights(self) -> tuple[int, int]:
        return self.lineage, self.version

    async def between_steps(
        self,
        action: Callable[[], R],
        what: str,
        deadline_s: float = SWAP_S,
        *,
        needs_turn: bool = False,
    ) -> R:
        """What `action` answers on the driver's side; its error is raised here. It does not begin
        once nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                answer = action()
            except MeshError as error:
                self._deliver(partial(_settle, done, error))
            else:
                self._deliver(partial(_settle, done, answer))

        self.command(run, needs_turn)
        async with self.mesh.clock.timeout(deadline_s, what):
            return await done

    async def take_turns(self, enabled: bool) -> None:
        """Whether its gang has others that compute by turns with it. Returns when it keeps to it,
        at the end of the step in hand.
        """
        if self.turns is not None and enabled != self.turns.enabled:
            await self.turns.settle(enabled)
            await self.between_steps(lambda: None, "the engine to take turns")

    @call(Engine.settle)
    async def settle(self, wish: Settle) -> Settled:
        return await self.tiers.settle(wish)

    @call(Engine.move)
    async def move(self, request: CacheMove) -> CacheMoved:
        """Takes over a session from another engine, as far as that goes; never an error."""
        if self.draining or request.owner not in self._owners:
            return CacheMoved(0, 0, 0.0, False)
        return await self.moves.fetch(request)

    @stream(Engine.export)
    async def export(self, request: Export) -> AsyncIterator[CacheFrame]:
        async with aclosing(self.moves.frames(request)) as frames:
            async for frame in frames:
                yield frame

    async def stop(self) -> None:
        await self.tiers.stop()

    @cast(Engine.look)
    def look(self, hint: Look) -> None:
        self.changed.set()

    @call(Engine.drain)
    async def drain(self, request: Drain) -> Drained:
        """Takes nothing more; what runs ends as aborted, with every token so far delivered."""
        self.draining = True
        ids = list(self._routes)
        self.command(lambda: self.engine.abort(ids))
        async with self.mesh.clock.timeout(4.0, "the last tokens to leave"):
            while self._routes:
                await self.mesh.clock.sleep(0.01)
        for owner in self._owners.values():
            owner.flushes.put_nowait(None)
        return Drained()


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in outline(tensors).values())


def _settle(done: asyncio.Future[R], answer: R | MeshError) -> None:
    if done.cancelled():
        return
    if isinstance(answer, MeshError):
        done.set_exception(answer)
    else:
        done.set_result(answer)


def _cut(
    flush: Flush,
    routes: list[tuple[Attached, int] | None],
    mine: list[bool],
    lineage: int,
    version: int,
) -> Tokens:
    """The part of a flush that belongs to one owner, under the owner's request ids."""
    ids = np.array([r[1] for r, m in zip(routes, mine, strict=True) if m and r], np.int64)
    if all(mine):
        return Tokens(
            ids,
            flush.counts,
            flush.tokens,
            flush.logprobs,
            flush.unmodified,
            flush.versions,
            flush.finish,
            version,
            flush.experts,
            lineage,
        )
    rows = np.array(mine)
    tokens = np.repeat(rows, flush.counts)
    return Tokens(
        ids,
        flush.counts[rows],
        flush.tokens[tokens],
        flush.logprobs[tokens],
        flush.unmodified[tokens] if len(flush.unmodified) else flush.unmodified,
        flush.versions[tokens],
        flush.finish[rows],
        version,
        flush.experts[tokens] if len(flush.experts) else flush.experts,
        lineage,
    )
