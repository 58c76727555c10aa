"""One engine as a rollout shard sees it: requests out, tokens into ledger and trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.api.engine import Abort, Attach, Engine, Sampling, Submit, Tokens
from common.mesh import Mesh, Ref
from services.rollout.batching import Batcher
from services.rollout.routing import EngineLoad
from services.rollout.trajectory import Trajectory

UNKNOWN = -1  # the trajectory of tokens that nobody waits for any more
NO_VERSION = -1  # of an engine that may serve nobody now
RUNNING, STOP, LENGTH, ABORTED = range(4)  # finish codes of common.api.engine.Tokens
REST_S = 0.5  # an engine that failed a turn gets no other for so long: it may be draining
SILENT_S = 1.0  # an engine with requests flushes every 20 ms
TURN_S = 600.0  # a turn that takes longer is handed to another engine


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as an engine sees it."""

    trajectory: Trajectory
    max_new: int


class TokenSink(Protocol):
    async def tokens(self, ids: list[int], counts: list[int], flush: Tokens) -> None:
        """Writes model tokens down before they count; returns when they are."""


class EngineLink:
    """One engine as this shard sees it: a stream of tokens and the requests that are out."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        bound: int,
        sink: TokenSink,
        sampling: Sampling,
        on_version: Callable[[], None],
    ) -> None:
        self.name, self.bound = name, bound
        self.version = NO_VERSION
        self.held: set[int] = set()  # trajectories whose slot is here
        self.ended: list[int] = []  # trajectories whose slots the engine may reuse
        self._unwanted: list[int] = []  # requests to abort before the next is submitted
        self._rests_until = 0.0
        self._mesh, self._sink, self._sampling = mesh, sink, sampling
        self._on_version = on_version  # its weights are newer now
        self._ref: Ref = mesh.ref(name)
        self._requests: dict[int, tuple[Trajectory, asyncio.Future[int]]] = {}
        self._next = 0
        self._heard = mesh.clock.monotonic()  # of a flush, or of a first request
        self._silence = ExitStack()  # holds the wait that is published while it is silent
        self._batcher: Batcher[tuple[int, Turn], None] = Batcher(self._submit, in_flight=2)

    @property
    def load(self) -> EngineLoad:
        rests = self._mesh.clock.monotonic() < self._rests_until
        return EngineLoad(
            self.name, self.bound, len(self.held), NO_VERSION if rests else self.version
        )

    def rest(self) -> None:
        """Takes no turn for a while."""
        self._rests_until = self._mesh.clock.monotonic() + REST_S

    async def run(self) -> None:
        """Reads the stream until the engine is gone; then every request that is out ends as
        aborted.
        """
        try:
            attach = Attach(self._mesh.name, self._mesh.incarnation)
            async for flush in self._ref.stream(Engine.attach, attach):
                await self._arrived(flush)
        finally:
            self.version = NO_VERSION
            self._silence.close()
            await self._batcher.close()
            for _, future in self._requests.values():
                if not future.done():
                    future.set_result(ABORTED)
            self._requests.clear()
            self.held.clear()

    def listen(self) -> None:
        """Publishes that this shard waits for the engine once it has been silent for a while."""
        silent = self._mesh.clock.monotonic() - self._heard > SILENT_S
        if self._requests and silent:
            self._silence.close()
            self._silence.enter_context(self._mesh.waits.wait("tokens", self.name, self._heard))

    async def generate(self, turn: Turn) -> int:
        """Submits a turn; returns its finish code once every token of it is written down."""
        self._next += 1
        request = self._next
        if not self._requests:
            self._heard = self._mesh.clock.monotonic()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._requests[request] = (turn.trajectory, future)
        submitted = self._batcher.put((request, turn))
        submitted.add_done_callback(lambda f: self._refused(request, f))
        try:
            async with self._mesh.clock.timeout(TURN_S, f"a turn on {self.name}"):
                return await future
        except BaseException:
            if self._requests.pop(request, None) is not None:
                abort = Abort(self._mesh.name, np.array([request], np.int64))
                await self._ref.cast(Engine.abort, abort)
            raise

    def _refused(self, request: int, submitted: asyncio.Future[None]) -> None:
        if submitted.cancelled() or submitted.exception() is not None:
            _, future = self._requests.pop(request, (None, None))
            self._unwanted.append(request)  # it may have been taken, its answer lost
            if future is not None and not future.done():
                future.set_result(ABORTED)

    async def _submit(self, batch: list[tuple[int, Turn]]) -> list[Exception | None]:
        ts = [turn.trajectory for _, turn in batch]
        ended, self.ended = self.ended, []
        if self._unwanted:
            abort = Abort(self._mesh.name, np.array(self._unwanted, np.int64))
            self._unwanted = []
            await self._ref.cast(Engine.abort, abort)
        await self._ref.call(
            Engine.submit,
            Submit(
                owner=self._mesh.name,
                incarnation=self._mesh.incarnation,
                ids=np.array([request for request, _ in batch], np.int64),
                sessions=np.array([t.id for t in ts], np.int64),
                lengths=np.array([t.length for t in ts], np.int32),
                tokens=np.concatenate([t.tokens for t in ts]),
                begins=np.array([t.length - len(t.turn) for t in ts], np.int32),
                max_new=np.array([turn.max_new for _, turn in batch], np.int32),
                temperature=np.array([t.temperature for t in ts], np.float32),
                seeds=np.array([t.seed for t in ts], np.int64),
                sampling=self._sampling,
                ended=np.array(ended, np.int64),
            ),
        )
        return [None] * len(batch)

    async def _arrived(self, flush: Tokens) -> None:
        self._silence.close()
        self._heard = self._mesh.clock.monotonic()
        if flush.version > self.version:
            self.version = flush.version
            self._on_version()
        counts = flush.counts.tolist()
        found = [self._requests.get(i) for i in flush.ids.tolist()]
        known = [pair[0].id if pair else UNKNOWN for pair in found]
        await self._sink.tokens(known, counts, flush)
        at = 0
        finishes = flush.finish.tolist()
        for i, pair in enumerate(found):
            end = at + counts[i]
            if pair is not None:
                trajectory, future = pair
                if end > at:
                    trajectory.sampled(
                        flush.tokens[at:end], flush.logprobs[at:end], flush.versions[at:end]
                    )
                if finishes[i] != RUNNING:
                    del self._requests[int(flush.ids[i])]
                    if not future.done():
                        future.set_result(finishes[i])
            at = end
