"""The link to one engine: requests go out, tokens come into the ledger and the trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshrl.common.api.engine import (
    Abort,
    Attach,
    CacheMove,
    CacheMoved,
    Engine,
    Finish,
    Sampling,
    Submit,
)
from meshrl.common.api.stats import EngineStats
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.ref import Ref
from meshrl.common.state.registry import Entry
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.record.staging import OpenRequest
from meshrl.services.rollout.routing import balance
from meshrl.services.rollout.routing.cache_moves import MoveCosts
from meshrl.services.rollout.routing.queues import EngineLoad
from meshrl.services.rollout.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from meshrl.services.rollout.routing.stay import Stay

NO_VERSION = -1  # the version of an engine that may serve nobody now
REST_S = 0.5  # an engine that failed a turn gets no other for so long: it may be draining
SILENT_S = 1.0  # an engine with requests flushes every 20 ms
TURN_S = 600.0  # a turn that takes longer is handed to another engine


@dataclass(frozen=True)
class SeenEngine:
    """An engine as the registry has it."""

    host: str
    stats: EngineStats

    @classmethod
    def of(cls, entry: Entry) -> SeenEngine:
        return cls(entry.host, EngineStats.of(entry.stats))


class EngineLink:
    """One engine as this shard sees it: a stream of tokens and the requests that are out."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        seats: int,
        sink: GroupCommit,
        sampling: Sampling,
        on_version: Callable[[], None],
    ) -> None:
        self.name = name
        self.seats = seats  # trajectories that it holds
        self.batch = self.bound = seats  # requests that it runs, and that it may have from here
        self.bucket = 0
        self.lineage = 0  # the job's lineage: weights of earlier ones may serve nobody
        self._weights = 0, NO_VERSION  # (lineage, version) of its weights
        self.held: set[Stay] = set()  # stays that have a seat here
        self.out: dict[Stay, None] = {}  # stays among them with a turn under way, oldest first
        self.ended: set[int] = set()  # trajectories whose slots the engine may reuse
        self.host = ""
        self._costs = {across: MoveCosts() for across in (False, True)}  # moves to here
        self._others: dict[str, int] = {}  # requests of other shards
        self._plateau = 0
        self._rests_until = 0.0
        self._mesh, self._sink, self._sampling = mesh, sink, sampling
        self._on_version = on_version  # its weights are newer now
        self._ref: Ref = mesh.ref(name)
        self._aborts: set[asyncio.Task[None]] = set()
        self._heard = mesh.clock.monotonic()  # when a flush came, or a first request went out
        self._silence = ExitStack()  # holds the wait that is published while it is silent
        self._batcher: Batcher[tuple[OpenRequest, int], None] = Batcher(self._submit, in_flight=2)

    @property
    def version(self) -> int:
        """The version of its weights; NO_VERSION while they are none of the job's."""
        lineage, version = self._weights
        return version if lineage >= self.lineage else NO_VERSION

    @property
    def open(self) -> bool:
        """Whether it may take another request, if somebody has a seat for it."""
        return len(self.out) < self.bound

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
            sum(self._others.values()),
        )

    @property
    def whole(self) -> balance.TotalLoad:
        total = len(self.out) + sum(self._others.values())
        executing = min(total, self.batch)
        return balance.TotalLoad(
            self.name, self.batch, executing, total - executing, self._plateau, self.load.version
        )

    def share(self, count: int) -> int:
        """How many of `count` requests are this shard's to move: all shards divide them alike, in
        proportion to what each has here."""
        have = {**self._others, self._mesh.name: len(self.out)}
        total = sum(have.values()) or 1
        parts = {shard: count * n // total for shard, n in have.items()}
        rest = count - sum(parts.values())
        return parts[self._mesh.name] + (self._mesh.name in sorted(have)[:rest])

    def published(self, seen: SeenEngine) -> None:
        stats = seen.stats
        self._others = {s: n for s, n in stats.requests.items() if s != self._mesh.name}
        # Room in the engine's own slots is its queue's affair; a smaller batch is the shards'.
        shards = 1 + len(self._others) if self.batch < self.seats else 1
        self.bound = -(-self.batch // shards)
        self._plateau = stats.plateau
        self.host = seen.host
        for costs in self._costs.values():
            costs.published(stats)

    def take(self, stay: Stay) -> None:
        """A stay has a seat here, and a turn."""
        self.held.add(stay)
        self.out[stay] = None
        self.ended.discard(stay.trajectory.id)  # left by an earlier stay here

    def free(self, stay: Stay) -> None:
        self.held.discard(stay)
        self.out.pop(stay, None)

    def failed(self) -> None:
        self._rests_until = self._mesh.clock.monotonic() + REST_S

    async def run(self) -> None:
        """Reads the stream until the engine is gone; then every request that is out ends as
        aborted.
        """
        try:
            attach = Attach(self._mesh.name, self._mesh.incarnation)
            async for flush in self._ref.stream(Engine.attach, attach):
                self._silence.close()
                self._heard = self._mesh.clock.monotonic()
                weights = flush.lineage, flush.version  # a new lineage may begin at an earlier one
                if weights > self._weights or flush.version < 0:  # it holds nobody knows what
                    self._weights = weights
                    self._on_version()
                if len(flush.ids):
                    await self._sink.put(self.name, flush)
        finally:
            self._weights = 0, NO_VERSION
            self._silence.close()
            ids = [stay.request.id for stay in self.out if stay.request is not None]
            self._sink.abort(self.name, ids)  # after what the engine had flushed
            for stay in self.held:
                stay.lost()
            await self._batcher.close()

    def listen(self) -> None:
        """Publishes that this shard waits for the engine once it has been silent for a while."""
        silent = self._mesh.clock.monotonic() - self._heard > SILENT_S
        if not self._busy or self._mesh.job_clock.held:
            self._silence.close()
        elif silent:
            self._silence.close()
            self._silence.enter_context(self._mesh.waits.wait("tokens", self.name, self._heard))

    @property
    def _busy(self) -> bool:
        return any(stay.request is not None for stay in self.out)

    async def generate(self, stay: Stay, max_new: int) -> Finish:
        """Submits a turn; returns how it ended once every token of it is written down."""
        if not self._busy:
            self._heard = self._mesh.clock.monotonic()
        request = stay.request = self._sink.open(stay.trajectory)
        try:
            submitted = self._batcher.put((request, max_new))
            submitted.add_done_callback(lambda f: self._submitted(request, f))
            return Finish(await self._ended(request))
        finally:
            stay.request = None
            if self._sink.forget(request):
                self._abort([request.id])
            del self.out[stay]

    async def _ended(self, request: OpenRequest) -> int:
        """How a turn ends; one that takes too long as aborted, behind what has come of it."""
        clock = self._mesh.job_clock
        try:
            async with clock.timeout(TURN_S, f"a turn on {self.name}"):
                return await asyncio.shield(request.done)
        except MeshError:
            self._abort([request.id])
            self._sink.abort(self.name, [request.id])
            async with clock.timeout(TURN_S, "tokens to be written"):
                return await request.done

    def costs(self, source: EngineLink) -> MoveCosts:
        return self._costs[self.host != source.host]

    async def fetch(self, t: Trajectory, source: EngineLink) -> None:
        """Brings the trajectory's keys and values here from `source`, as far as that goes."""
        move = CacheMove(self._mesh.name, t.id, source.name)
        moved: CacheMoved = await self._ref.call(Engine.move, move)
        self.costs(source).moved(moved.first_s)

    def movable(self, count: int, pending: bool) -> list[Stay]:
        """Up to `count` stays whose requests wait here, the latest first, or else run, the shortest
        first, since those are computed again soonest.
        """
        found = [s for s in self.out if s.request is not None and s.request.waits == pending]
        if pending:
            return found[::-1][:count]
        return sorted(found, key=lambda s: s.trajectory.length)[:count]

    def let_go(self, stay: Stay) -> None:
        """Asks the engine to abort the stay's request: it ends when its last tokens are here."""
        if stay.request is not None:
            self._abort([stay.request.id])

    def _abort(self, requests: list[int]) -> None:
        abort = Abort(self._mesh.name, np.array(requests, np.int64))
        task = asyncio.get_running_loop().create_task(self._ref.cast(Engine.abort, abort))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _submitted(self, request: OpenRequest, answered: asyncio.Future[None]) -> None:
        """Ends a request that the engine did not take, or may have taken, its answer lost."""
        error = None if answered.cancelled() else answered.exception()
        if isinstance(error, Refused):
            if self._sink.forget(request) and not request.done.done():
                request.done.set_result(Finish.REFUSED)
        elif answered.cancelled() or error is not None:
            self._abort([request.id])
            if not request.over:
                self._sink.abort(self.name, [request.id])
        elif request.over and not request.done.done():  # given up before the engine had it
            self._abort([request.id])

    async def _submit(self, batch: list[tuple[OpenRequest, int]]) -> list[Exception | None]:
        answers: list[Exception | None] = [None] * len(batch)
        batch = [turn for turn in batch if not turn[0].over]  # the others were given up meanwhile
        if not batch:
            return answers
        ts = [request.trajectory for request, _ in batch]
        ended, self.ended = self.ended, set()
        submit = Submit(
            owner=self._mesh.name,
            incarnation=self._mesh.incarnation,
            ids=np.array([request.id for request, _ in batch], np.int64),
            sessions=np.array([t.id for t in ts], np.int64),
            lengths=np.array([t.length for t in ts], np.int32),
            tokens=np.concatenate([t.tokens for t in ts]),
            begins=np.array([t.turn_start for t in ts], np.int32),
            max_new=np.array([max_new for _, max_new in batch], np.int32),
            temperature=np.array([t.temperature for t in ts], np.float32),
            seeds=np.array([t.seed for t in ts], np.int64),
            sampling=self._sampling,
            ended=np.fromiter(ended, np.int64),
        )
        try:
            await self._ref.call(Engine.submit, submit)
        except MeshError:
            self.ended |= ended  # it may not have heard
            raise
        return answers
