"""The actor of an engine process: requests of rollout shards in, tokens out, weights swapped
between two steps.

The engine itself is driven from elsewhere (a thread where it computes, a task where it is
simulated): the driver calls `turn` in a loop, which runs what was asked for since, one step, and
hands over what is to be flushed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from common.actor import Actor, call, cast, stream
from common.api.engine import Abort, Attach, Engine, Submit, Submitted, Tokens
from common.api.hint import Look
from common.api.role import Drain, Drained
from common.errors import Refused
from common.mesh import Mesh
from services.rollout.engines.base import Engine as TokenEngine
from services.rollout.engines.base import Flush, Request

FLUSH_STEPS = 8
FLUSH_S = 0.02  # tokens leave after 8 steps or 20 ms, at once when a request ends


EMPTY = Flush(
    ids=np.zeros(0, np.int64),
    counts=np.zeros(0, np.int32),
    tokens=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    finish=np.zeros(0, np.int8),
)


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
        self, mesh: Mesh, engine: TokenEngine, slots: int, deliver: Callable[[Any], None]
    ) -> None:
        self.mesh, self.engine = mesh, engine
        self._slots = slots
        self._turned_at = mesh.clock.monotonic()
        self.occupied_s = 0.0  # time that all slots together would have needed for what they did
        self._deliver = deliver  # runs a function on the loop, from the driver's thread
        self._owners: dict[str, Attached] = {}
        self._routes: dict[int, tuple[Attached, int]] = {}  # the engine's request -> owner and id
        self._next = 0
        self._commands: deque[Callable[[], None]] = deque()
        self.wake = threading.Event()
        self.changed = asyncio.Event()
        self.draining = False
        self._steps = 0
        self._flushed_at = 0.0
        self.manifest = ""  # of the weights that are loaded

    # -- the driver's side -----------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn of the driver's loop; False when there was nothing to do."""
        while self._commands:
            self._commands.popleft()()
        running = self.engine.running
        busy = self.engine.step()
        self._steps += 1
        now = self.mesh.clock.monotonic()
        self.occupied_s += (now - self._turned_at) * running / self._slots
        self._turned_at = now
        due = self._steps >= FLUSH_STEPS or now - self._flushed_at >= FLUSH_S or not busy
        if due:
            self._steps, self._flushed_at = 0, now
        if due or self.engine.ended:
            flush = self.engine.drain(ended_only=not due)
            if flush is not None:
                self._deliver(lambda: self._route(flush))
        return busy or bool(self._commands)

    def command(self, action: Callable[[], None]) -> None:
        """Runs `action` on the driver's side before the next step."""
        self._commands.append(action)
        self.wake.set()

    # -- the loop's side -------------------------------------------------------------------------

    def _route(self, flush: Flush) -> None:
        """Cuts a flush by owner."""
        routes = [self._routes.get(i) for i in flush.ids.tolist()]
        owners = {route[0] for route in routes if route is not None}
        for owner in owners:
            mine = [route is not None and route[0] is owner for route in routes]
            owner.flushes.put_nowait(_cut(flush, routes, mine, self.engine.version))
        for i, finish in zip(flush.ids.tolist(), flush.finish.tolist(), strict=True):
            if finish and (route := self._routes.pop(i, None)) is not None:
                route[0].ids.pop(route[1], None)

    @stream(Engine.attach)
    async def attach(self, request: Attach) -> AsyncIterator[Tokens]:
        if self.draining:
            raise Refused("the engine is draining", where=self.mesh.name, fix="ask another one")
        previous = self._owners.get(request.owner)
        if previous is not None:
            self._detach(previous)
        owner = self._owners[request.owner] = Attached(request)
        owner.flushes.put_nowait(_cut(EMPTY, [], [], self.engine.version))
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
        stop = tuple(batch.stop)
        ends = np.cumsum(batch.lengths).tolist()
        start = 0
        columns = zip(
            batch.ids.tolist(),
            batch.sessions.tolist(),
            ends,
            batch.max_new.tolist(),
            batch.temperature.tolist(),
            batch.seeds.tolist(),
            strict=True,
        )
        for identity, session, end, most, temperature, seed in columns:
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
                )
            )
            start = end
        ended = batch.ended.tolist()
        self.command(lambda: self._admit(requests, ended))
        return Submitted(len(requests))

    def _admit(self, requests: list[Request], ended: list[int]) -> None:
        if ended:
            self.engine.release(ended)
        self.engine.submit(requests)

    @cast(Engine.abort)
    def abort(self, request: Abort) -> None:
        owner = self._owners.get(request.owner)
        if owner is not None:
            ids = [owner.ids[i] for i in request.ids.tolist() if i in owner.ids]
            self.command(lambda: self.engine.abort(ids))

    async def swap(self, tensors: dict[str, Any], version: int, manifest: str) -> None:
        """Puts a version's weights in place between two steps; keys and values are kept."""
        loop = asyncio.get_running_loop()
        swapped: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not swapped.done():
                swapped.set_result(None)

        def put() -> None:
            self.engine.swap(tensors, version)
            self._deliver(settle)

        self.command(put)
        async with self.mesh.clock.timeout(60.0, "the engine to take new weights"):
            await swapped
        self.manifest = manifest
        for owner in self._owners.values():
            owner.flushes.put_nowait(_cut(EMPTY, [], [], version))

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
        return Drained(len(ids))


def _cut(
    flush: Flush, routes: list[tuple[Attached, int] | None], mine: list[bool], version: int
) -> Tokens:
    """The part of a flush that belongs to one owner, under the owner's request ids."""
    ids = np.array([r[1] for r, m in zip(routes, mine, strict=True) if m and r], np.int64)
    if all(mine):
        arrays = (flush.counts, flush.tokens, flush.logprobs, flush.versions, flush.finish)
        return Tokens(ids, *arrays, version=version)
    rows = np.array(mine)
    tokens = np.repeat(rows, flush.counts)
    return Tokens(
        ids,
        flush.counts[rows],
        flush.tokens[tokens],
        flush.logprobs[tokens],
        flush.versions[tokens],
        flush.finish[rows],
        version,
    )
