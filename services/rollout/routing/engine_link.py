"""Link to one engine: it submits requests, and writes received tokens to the ledger and the
trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshrl.common.api.engine import (
    AbortRequests,
    AttachStream,
    CacheMove,
    CacheMoveResult,
    Engine,
    FinishReason,
    SamplingParams,
    SubmitRequests,
)
from meshrl.common.api.stats import EngineStats
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.registry import RegistryEntry
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.record.staging import OpenRequest
from meshrl.services.rollout.routing import load_balancer
from meshrl.services.rollout.routing.cache_move_policy import MoveCosts
from meshrl.services.rollout.routing.queue_policy import EngineLoad
from meshrl.services.rollout.routing.seeding import SeedingEngine
from meshrl.services.rollout.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from meshrl.services.rollout.routing.assignment import Assignment

NO_VERSION = -1  # the version of an engine that must not serve now
BACKOFF_S = 0.5  # pause of an engine after a failed turn: it may be draining
SILENT_S = 1.0  # an engine with requests flushes every 20 ms
TURN_TIMEOUT_S = 600.0  # a turn that takes longer is moved to another engine


@dataclass(frozen=True)
class EngineSnapshot:
    """Registry entry of an engine."""

    host: str
    stats: EngineStats

    @classmethod
    def from_entry(cls, entry: RegistryEntry) -> EngineSnapshot:
        return cls(entry.host, EngineStats.decode(entry.stats))


class EngineLink:
    """Connection of this shard to one engine: its stream of tokens and the open requests."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        slots: int,
        group_commit: GroupCommit,
        sampling: SamplingParams,
        on_version: Callable[[], None],
    ) -> None:
        self.name = name
        self.slots = slots  # trajectories in its cache
        self.batch_size = self.max_requests = (
            slots  # requests that it runs, and its limit for this shard
        )
        self.bucket = 0
        self.lineage = 0  # the job's lineage: weights of earlier ones must not serve
        self._weights = 0, NO_VERSION  # (lineage, version) of its weights
        self.assignments: set[Assignment] = set()  # assignments with a slot here
        self.running_assignments: dict[
            Assignment, None
        ] = {}  # assignments with a turn in progress, oldest first
        self.ended_sessions: set[int] = set()  # trajectories whose slots the engine may reuse
        self.host = ""
        self.takes_slices = False  # it shares workers with a core
        self.is_closed = False  # its seeding window has ended: it gets no requests
        self._loaded_at_s = mesh.clock.monotonic()  # of its weights
        self._move_costs = {across: MoveCosts() for across in (False, True)}  # moves to this engine
        self._other_requests: dict[str, int] = {}  # requests of other shards
        self._plateau = 0
        self._backoff_until_s = 0.0
        self._is_leaving = False  # its host is about to end: it only sends caches
        self._mesh, self._group_commit, self._sampling = mesh, group_commit, sampling
        self._on_version = on_version  # called when its weights are newer
        self._ref: ActorRef = mesh.ref(name)
        self._abort_tasks: set[asyncio.Task[None]] = set()
        self._last_flush_s = mesh.clock.monotonic()  # time of the last flush, or of a first request
        self._silence_wait = ExitStack()  # the wait published while it is silent
        self._batcher: Batcher[tuple[OpenRequest, int], None] = Batcher(
            self._submit, max_in_flight=2
        )

    @property
    def version(self) -> int:
        """Version of its weights; NO_VERSION if they are not of the job's lineage."""
        lineage, version = self._weights
        return version if lineage >= self.lineage else NO_VERSION

    @property
    def has_room(self) -> bool:
        """True if it accepts another request of an assignment with a slot."""
        return len(self.running_assignments) < self.max_requests

    @property
    def load(self) -> EngineLoad:
        rests = self._mesh.clock.monotonic() < self._backoff_until_s
        return EngineLoad(
            self.name,
            self.max_requests,
            len(self.running_assignments),
            NO_VERSION if rests or self.is_closed or self._is_leaving else self.version,
            self.bucket,
            self.slots,
            len(self.assignments),
            sum(self._other_requests.values()),
        )

    @property
    def seeding(self) -> SeedingEngine:
        loaded_s = self._mesh.clock.monotonic() - self._loaded_at_s
        return SeedingEngine(self.name, self.takes_slices, self.version, loaded_s)

    @property
    def total_load(self) -> load_balancer.EngineTotalLoad:
        total = len(self.running_assignments) + sum(self._other_requests.values())
        executing = min(total, self.batch_size)
        return load_balancer.EngineTotalLoad(
            self.name,
            self.batch_size,
            executing,
            total - executing,
            self._plateau,
            self.load.version,
        )

    def compute_share(self, count: int) -> int:
        """Return this shard's share of `count` requests to move. All shards divide them the same
        way, in proportion to their requests here.
        """
        have = {**self._other_requests, self._mesh.name: len(self.running_assignments)}
        total = sum(have.values()) or 1
        parts = {shard: count * n // total for shard, n in have.items()}
        rest = count - sum(parts.values())
        return parts[self._mesh.name] + (self._mesh.name in sorted(have)[:rest])

    def update_stats(self, snapshot: EngineSnapshot) -> None:
        stats = snapshot.stats
        self._other_requests = {s: n for s, n in stats.requests.items() if s != self._mesh.name}
        # The engine's queue handles its own slots; a smaller batch is the shards' limit.
        shards = 1 + len(self._other_requests) if self.batch_size < self.slots else 1
        self.max_requests = -(-self.batch_size // shards)
        self._plateau, self._is_leaving = stats.plateau, stats.leaving
        self.host, self.takes_slices = snapshot.host, stats.time_sliced
        for costs in self._move_costs.values():
            costs.update_stats(stats)

    def assign(self, assignment: Assignment) -> None:
        """Assign a slot here, with a turn."""
        self.assignments.add(assignment)
        self.running_assignments[assignment] = None
        self.ended_sessions.discard(assignment.trajectory.id)  # from an earlier assignment here

    def unassign(self, assignment: Assignment) -> None:
        self.assignments.discard(assignment)
        self.running_assignments.pop(assignment, None)

    def back_off(self) -> None:
        self._backoff_until_s = self._mesh.clock.monotonic() + BACKOFF_S

    async def read_stream(self) -> None:
        """Read the stream until the engine is lost; then abort all open requests."""
        try:
            attach = AttachStream(self._mesh.name, self._mesh.incarnation)
            async for flush in self._ref.stream(Engine.attach, attach):
                self._silence_wait.close()
                self._last_flush_s = self._mesh.clock.monotonic()
                weights = (
                    flush.loaded_lineage,
                    flush.loaded_version,
                )  # a new lineage may begin at an earlier version
                if weights > self._weights or flush.loaded_version < 0:  # its cache is unknown
                    if weights != self._weights:
                        self._loaded_at_s = self._last_flush_s
                    self._weights = weights
                    self._on_version()
                if len(flush.request_ids):
                    await self._group_commit.add_flush(self.name, flush)
        finally:
            self._weights = 0, NO_VERSION
            self._silence_wait.close()
            ids = [stay.request.id for stay in self.running_assignments if stay.request is not None]
            self._group_commit.abort(self.name, ids)  # after the tokens flushed by the engine
            for stay in self.assignments:
                stay.mark_engine_lost()
            await self._batcher.close()

    def publish_silence(self) -> None:
        """Publish that this shard waits for the engine once it has been silent for a while."""
        silent = self._mesh.clock.monotonic() - self._last_flush_s > SILENT_S
        if not self._is_busy or self._mesh.job_clock.is_paused:
            self._silence_wait.close()
        elif silent:
            self._silence_wait.close()
            self._silence_wait.enter_context(
                self._mesh.waits.wait("tokens", self.name, self._last_flush_s)
            )

    @property
    def _is_busy(self) -> bool:
        return any(stay.request is not None for stay in self.running_assignments)

    async def generate(self, assignment: Assignment, max_new_tokens: int) -> FinishReason:
        """Submit a turn; return its finish reason once all its tokens are written."""
        if not self._is_busy:
            self._last_flush_s = self._mesh.clock.monotonic()
        request = assignment.request = self._group_commit.open_request(assignment.trajectory)
        try:
            submitted = self._batcher.submit((request, max_new_tokens))
            submitted.add_done_callback(lambda f: self._on_submitted(request, f))
            return FinishReason(await self._wait_for_finish(request))
        finally:
            assignment.request = None
            if self._group_commit.close_request(request):
                self._abort([request.id])
            del self.running_assignments[assignment]

    async def _wait_for_finish(self, request: OpenRequest) -> int:
        """Return the finish code of a turn; abort it after the time limit, behind its received
        tokens.
        """
        clock = self._mesh.job_clock
        try:
            async with clock.timeout(TURN_TIMEOUT_S, f"generation of a turn on {self.name}"):
                return await asyncio.shield(request.done)
        except MeshError:
            self._abort([request.id])
            self._group_commit.abort(self.name, [request.id])
            async with clock.timeout(TURN_TIMEOUT_S, "the write of received tokens"):
                return await request.done

    def get_move_costs(self, source: EngineLink) -> MoveCosts:
        return self._move_costs[self.host != source.host]

    async def fetch_cache(self, trajectory: Trajectory, source: EngineLink) -> None:
        """Fetch as much as possible of the trajectory's KV cache from `source`."""
        move = CacheMove(self._mesh.name, trajectory.id, source.name)
        moved: CacheMoveResult = await self._ref.call(Engine.move_cache, move)
        self.get_move_costs(source).record_move(moved.first_byte_s)

    def find_movable(self, count: int, waiting: bool) -> list[Assignment]:
        """Return up to `count` assignments with waiting requests, the latest first, or with running
        ones, the shortest first. Short ones are recomputed soonest.
        """
        found = [
            s
            for s in self.running_assignments
            if s.request is not None and s.request.is_waiting == waiting
        ]
        if waiting:
            return found[::-1][:count]
        return sorted(found, key=lambda s: s.trajectory.length)[:count]

    def abort_requests(self, assignments: Iterable[Assignment]) -> None:
        """Abort the assignments' requests; they end when their last tokens are received."""
        if found := [one.request.id for one in assignments if one.request is not None]:
            self._abort(found)

    def _abort(self, requests: list[int]) -> None:
        abort = AbortRequests(self._mesh.name, np.array(requests, np.int64))
        task = asyncio.get_running_loop().create_task(self._ref.cast(Engine.abort, abort))
        self._abort_tasks.add(task)
        task.add_done_callback(self._abort_tasks.discard)

    def _on_submitted(self, request: OpenRequest, answered: asyncio.Future[None]) -> None:
        """End a request that the engine did not accept, or whose answer was lost."""
        error = None if answered.cancelled() else answered.exception()
        if isinstance(error, Refused):
            if self._group_commit.close_request(request) and not request.done.done():
                request.done.set_result(FinishReason.REJECTED)
        elif answered.cancelled() or error is not None:
            self._abort([request.id])
            if not request.is_closed:
                self._group_commit.abort(self.name, [request.id])
        elif request.is_closed and not request.done.done():  # aborted before the engine received it
            self._abort([request.id])

    async def _submit(self, batch: list[tuple[OpenRequest, int]]) -> list[Exception | None]:
        answers: list[Exception | None] = [None] * len(batch)
        batch = [
            turn for turn in batch if not turn[0].is_closed
        ]  # the others were aborted in the mean time
        if not batch:
            return answers
        ts = [request.trajectory for request, _ in batch]
        ended_sessions, self.ended_sessions = self.ended_sessions, set()
        submit = SubmitRequests(
            owner=self._mesh.name,
            incarnation=self._mesh.incarnation,
            request_ids=np.array([request.id for request, _ in batch], np.int64),
            sessions=np.array([t.id for t in ts], np.int64),
            lengths=np.array([t.length for t in ts], np.int32),
            tokens=np.concatenate([t.tokens for t in ts]),
            turn_starts=np.array([t.turn_start for t in ts], np.int32),
            max_new_tokens=np.array([max_new for _, max_new in batch], np.int32),
            temperature=np.array([t.temperature for t in ts], np.float32),
            top_p=np.array([t.top_p for t in ts], np.float64),
            seeds=np.array([t.seed for t in ts], np.int64),
            sampling=self._sampling,
            ended_sessions=np.fromiter(ended_sessions, np.int64),
        )
        try:
            await self._ref.call(Engine.submit, submit)
        except MeshError:
            self.ended_sessions |= ended_sessions  # the message may be lost
            raise
        return answers
