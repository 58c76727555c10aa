"""One engine as a rollout shard sees it: requests out, tokens into ledger and trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from common.api.engine import Abort, Attach, Engine, Move, Moved, Sampling, Submit, Tokens
from common.errors import MeshError, Refused
from common.mesh import Mesh, Ref
from services.rollout import balance
from services.rollout.batching import Batcher
from services.rollout.moving import MoveCosts
from services.rollout.routing import EngineLoad
from services.rollout.trajectory import Trajectory

NO_VERSION = -1  # of an engine that may serve nobody now
STOP, LENGTH, ABORTED = 1, 2, 3  # finish codes of common.api.engine.Tokens
REFUSED = 4  # of a turn that the engine did not take
REST_S = 0.5  # an engine that failed a turn gets no other for so long: it may be draining
SILENT_S = 1.0  # an engine with requests flushes every 20 ms
TURN_S = 600.0  # a turn that takes longer is handed to another engine


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A request that is out."""

    trajectory: Trajectory
    done: asyncio.Future[int]  # its finish code
    length: int  # of the trajectory when it was made

    @property
    def waits(self) -> bool:
        """It has brought no token yet."""
        return self.trajectory.length == self.length


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as an engine sees it."""

    trajectory: Trajectory
    max_new: int


class TokenSink(Protocol):
    """Numbers requests, and writes their tokens down before they count; see `GroupCommit`."""

    def open(self, trajectory: Trajectory) -> tuple[int, asyncio.Future[int]]: ...
    def forget(self, request: int) -> bool: ...
    def abort(self, engine: str, requests: Iterable[int]) -> None: ...
    async def put(self, engine: str, flush: Tokens) -> None: ...
    async def settled(self) -> None: ...


class EngineLink:
    """One engine as this shard sees it: a stream of tokens and the requests that are out."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        seats: int,
        sink: TokenSink,
        sampling: Sampling,
        on_version: Callable[[], None],
    ) -> None:
        self.name = name
        self.seats = self.bound = seats  # trajectories that it holds, requests that it runs
        self.bucket = 0
        self.version = NO_VERSION
        self.held: set[int] = set()  # trajectories whose slot is here
        self.out: set[int] = set()  # those of them that are having a turn
        self.ended: list[int] = []  # trajectories whose slots the engine may reuse
        self._unwanted: list[int] = []  # requests to abort before the next is submitted
        self.host = ""
        self._costs = {across: MoveCosts(across) for across in (False, True)}  # of moves to here
        self._others = 0  # requests of other shards
        self._plateau = 0
        self._rests_until = 0.0
        self._mesh, self._sink, self._sampling = mesh, sink, sampling
        self._on_version = on_version  # its weights are newer now
        self._ref: Ref = mesh.ref(name)
        self._requests: dict[int, Outstanding] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._heard = mesh.clock.monotonic()  # of a flush, or of a first request
        self._silence = ExitStack()  # holds the wait that is published while it is silent
        self._batcher: Batcher[tuple[int, Turn], None] = Batcher(self._submit, in_flight=2)

    @property
    def load(self) -> EngineLoad:
        rests = self._mesh.clock.monotonic() < self._rests_until
        return EngineLoad(
            self.name,
            self.bound,
            len(self.out),
            NO_VERSION if rests else self.version,
            self.bucket,
            self.seats,
            len(self.held),
            self._others,
        )

    @property
    def whole(self) -> balance.Engine:
        """The engine with what all shards have there."""
        total = len(self.out) + self._others
        executing = min(total, self.bound)
        return balance.Engine(
            self.name, self.bound, executing, total - executing, self._plateau, self.load.version
        )

    def published(self, stats: Mapping[str, Any]) -> None:
        """Takes what the engine tells of itself in the registry."""
        requests: Mapping[str, int] = stats.get("requests", {})
        self._others = sum(n for shard, n in requests.items() if shard != self._mesh.name)
        self._plateau = int(stats.get("plateau", 0))
        self.host = str(stats.get("host", ""))
        for costs in self._costs.values():
            costs.published(stats)

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
            self._sink.abort(self.name, self._requests)  # after what the engine had flushed
            self._requests.clear()
            self.held.clear()
            self.out.clear()

    def listen(self) -> None:
        """Publishes that this shard waits for the engine once it has been silent for a while."""
        silent = self._mesh.clock.monotonic() - self._heard > SILENT_S
        if self._requests and silent:
            self._silence.close()
            self._silence.enter_context(self._mesh.waits.wait("tokens", self.name, self._heard))

    async def generate(self, turn: Turn) -> int:
        """Submits a turn; returns its finish code once every token of it is written down."""
        if not self._requests:
            self._heard = self._mesh.clock.monotonic()
        request, future = self._sink.open(turn.trajectory)
        self._requests[request] = Outstanding(turn.trajectory, future, turn.trajectory.length)
        submitted = self._batcher.put((request, turn))
        submitted.add_done_callback(lambda f: self._refused(request, f))
        try:
            async with self._mesh.clock.timeout(TURN_S, f"a turn on {self.name}"):
                return await future
        except BaseException as error:
            if isinstance(error, MeshError):  # it goes on elsewhere, with all that is written down
                await self._sink.settled()
            if self._sink.forget(request):
                abort = Abort(self._mesh.name, np.array([request], np.int64))
                await self._ref.cast(Engine.abort, abort)
            raise
        finally:
            self._requests.pop(request, None)

    def costs(self, source: EngineLink) -> MoveCosts:
        """What it takes to move a cache here from `source`."""
        return self._costs[self.host != source.host]

    async def fetch(self, t: Trajectory, source: EngineLink) -> None:
        """Brings the trajectory's keys and values here from `source`, as far as that goes."""
        move = Move(self._mesh.name, t.id, source.name)
        moved: Moved = await self._ref.call(Engine.move, move)
        self.costs(source).moved(moved.bytes, moved.seconds)

    def movable(self, count: int, pending: bool) -> list[Trajectory]:
        """Up to `count` trajectories whose requests wait here, the latest first, or else run, the
        shortest first, since those are computed again soonest.
        """
        waits = [r.trajectory for r in self._requests.values() if r.waits == pending]
        if pending:
            return waits[::-1][:count]
        return sorted(waits, key=lambda t: t.length)[:count]

    def let_go(self, t: Trajectory) -> None:
        """Asks the engine to abort the trajectory's request: it ends when its last tokens are
        here.
        """
        ids = [i for i, r in self._requests.items() if r.trajectory is t]
        abort = Abort(self._mesh.name, np.array(ids, np.int64))
        task = asyncio.get_running_loop().create_task(self._ref.cast(Engine.abort, abort))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _refused(self, request: int, submitted: asyncio.Future[None]) -> None:
        error = None if submitted.cancelled() else submitted.exception()
        if submitted.cancelled() or error is not None:
            out = self._requests.pop(request, None)
            self._unwanted.append(request)  # it may have been taken, its answer lost
            if isinstance(error, Refused) and out is not None and not out.done.done():
                self._sink.forget(request)
                out.done.set_result(REFUSED)
            elif out is not None:
                self._sink.abort(self.name, [request])

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
        if len(flush.ids):
            await self._sink.put(self.name, flush)
