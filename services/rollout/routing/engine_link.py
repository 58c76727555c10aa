"""The link to one engine: requests go out, tokens come into the ledger and the trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from meshrl.services.rollout.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from meshrl.services.rollout.routing.assignment import Assignment

NO_VERSION = -1  # the version of an engine that may serve nobody now
BACKOFF_S = 0.5  # an engine that failed a turn gets no other for so long: it may be draining
SILENT_S = 1.0  # an engine with requests flushes every 20 ms
TURN_TIMEOUT_S = 600.0  # a turn that takes longer is handed to another engine


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine as the registry has it."""

    host: str
    stats: EngineStats

    @classmethod
    def from_entry(cls, entry: RegistryEntry) -> EngineSnapshot:
        return cls(entry.host, EngineStats.decode(entry.stats))


class EngineLink:
    """One engine as this shard sees it: a stream of tokens and the requests that are out."""

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
        self.slots = slots  # trajectories that it holds
        self.batch_size = self.max_requests = (
            slots  # requests that it runs, and that it may have from here
        )
        self.bucket = 0
        self.lineage = 0  # the job's lineage: weights of earlier ones may serve nobody
        self._weights = 0, NO_VERSION  # (lineage, version) of its weights
        self.assignments: set[Assignment] = set()  # stays that have a seat here
        self.running_assignments: dict[
            Assignment, None
        ] = {}  # stays among them with a turn under way, oldest first
        self.ended_sessions: set[int] = set()  # trajectories whose slots the engine may reuse
        self.host = ""
        self._move_costs = {across: MoveCosts() for across in (False, True)}  # moves to here
        self._other_requests: dict[str, int] = {}  # requests of other shards
        self._plateau = 0
        self._backoff_until_s = 0.0
        self._mesh, self._group_commit, self._sampling = mesh, group_commit, sampling
        self._on_version = on_version  # its weights are newer now
        self._ref: ActorRef = mesh.ref(name)
        self._abort_tasks: set[asyncio.Task[None]] = set()
        self._last_flush_s = (
            mesh.clock.monotonic()
        )  # when a flush came, or a first request went out
        self._silence_wait = ExitStack()  # holds the wait that is published while it is silent
        self._batcher: Batcher[tuple[OpenRequest, int], None] = Batcher(
            self._submit, max_in_flight=2
        )

    @property
    def version(self) -> int:
        """The version of its weights; NO_VERSION while they are none of the job's."""
        lineage, version = self._weights
        return version if lineage >= self.lineage else NO_VERSION

    @property
    def has_room(self) -> bool:
        """Whether it may take another request, if somebody has a seat for it."""
        return len(self.running_assignments) < self.max_requests

    @property
    def load(self) -> EngineLoad:
        rests = self._mesh.clock.monotonic() < self._backoff_until_s
        return EngineLoad(
            self.name,
            self.max_requests,
            len(self.running_assignments),
            NO_VERSION if rests else self.version,
            self.bucket,
            self.slots,
            len(self.assignments),
            sum(self._other_requests.values()),
        )

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
        """How many of `count` requests are this shard's to move: all shards divide them alike, in
        proportion to what each has here."""
        have = {**self._other_requests, self._mesh.name: len(self.running_assignments)}
        total = sum(have.values()) or 1
        parts = {shard: count * n // total for shard, n in have.items()}
        rest = count - sum(parts.values())
        return parts[self._mesh.name] + (self._mesh.name in sorted(have)[:rest])

    def update_stats(self, snapshot: EngineSnapshot) -> None:
        stats = snapshot.stats
        self._other_requests = {s: n for s, n in stats.requests.items() if s != self._mesh.name}
        # Room in the engine's own slots is its queue's affair; a smaller batch is the shards'.
        shards = 1 + len(self._other_requests) if self.batch_size < self.slots else 1
        self.max_requests = -(-self.batch_size // shards)
        self._plateau = stats.plateau
        self.host = snapshot.host
        for costs in self._move_costs.values():
            costs.update_stats(stats)

    def assign(self, assignment: Assignment) -> None:
        """A stay has a seat here, and a turn."""
        self.assignments.add(assignment)
        self.running_assignments[assignment] = None
        self.ended_sessions.discard(assignment.trajectory.id)  # left by an earlier stay here

    def unassign(self, assignment: Assignment) -> None:
        self.assignments.discard(assignment)
        self.running_assignments.pop(assignment, None)

    def back_off(self) -> None:
        self._backoff_until_s = self._mesh.clock.monotonic() + BACKOFF_S

    async def read_stream(self) -> None:
        """Reads the stream until the engine is gone; then every request that is out ends as
        aborted.
        """
        try:
            attach = AttachStream(self._mesh.name, self._mesh.incarnation)
            async for flush in self._ref.stream(Engine.attach, attach):
                self._silence_wait.close()
                self._last_flush_s = self._mesh.clock.monotonic()
                weights = (
                    flush.loaded_lineage,
                    flush.loaded_version,
                )  # a new lineage may begin at an earlier one
                if (
                    weights > self._weights or flush.loaded_version < 0
                ):  # it holds nobody knows what
                    self._weights = weights
                    self._on_version()
                if len(flush.request_ids):
                    await self._group_commit.add_flush(self.name, flush)
        finally:
            self._weights = 0, NO_VERSION
            self._silence_wait.close()
            ids = [stay.request.id for stay in self.running_assignments if stay.request is not None]
            self._group_commit.abort(self.name, ids)  # after what the engine had flushed
            for stay in self.assignments:
                stay.mark_engine_lost()
            await self._batcher.close()

    def publish_silence(self) -> None:
        """Publishes that this shard waits for the engine once it has been silent for a while."""
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
        """Submits a turn; returns how it ended once every token of it is written down."""
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
        """How a turn ends; one that takes too long as aborted, behind what has come of it."""
        clock = self._mesh.job_clock
        try:
            async with clock.timeout(TURN_TIMEOUT_S, f"a turn on {self.name}"):
                return await asyncio.shield(request.done)
        except MeshError:
            self._abort([request.id])
            self._group_commit.abort(self.name, [request.id])
            async with clock.timeout(TURN_TIMEOUT_S, "tokens to be written"):
                return await request.done

    def get_move_costs(self, source: EngineLink) -> MoveCosts:
        return self._move_costs[self.host != source.host]

    async def fetch_cache(self, trajectory: Trajectory, source: EngineLink) -> None:
        """Brings the trajectory's keys and values here from `source`, as far as that goes."""
        move = CacheMove(self._mesh.name, trajectory.id, source.name)
        moved: CacheMoveResult = await self._ref.call(Engine.move_cache, move)
        self.get_move_costs(source).record_move(moved.first_byte_s)

    def find_movable(self, count: int, waiting: bool) -> list[Assignment]:
        """Up to `count` stays whose requests wait here, the latest first, or else run, the shortest
        first, since those are computed again soonest.
        """
        found = [
            s
            for s in self.running_assignments
            if s.request is not None and s.request.is_waiting == waiting
        ]
        if waiting:
            return found[::-1][:count]
        return sorted(found, key=lambda s: s.trajectory.length)[:count]

    def abort_request(self, assignment: Assignment) -> None:
        """Asks the engine to abort the stay's request: it ends when its last tokens are here."""
        if assignment.request is not None:
            self._abort([assignment.request.id])

    def _abort(self, requests: list[int]) -> None:
        abort = AbortRequests(self._mesh.name, np.array(requests, np.int64))
        task = asyncio.get_running_loop().create_task(self._ref.cast(Engine.abort, abort))
        self._abort_tasks.add(task)
        task.add_done_callback(self._abort_tasks.discard)

    def _on_submitted(self, request: OpenRequest, answered: asyncio.Future[None]) -> None:
        """Ends a request that the engine did not take, or may have taken, its answer lost."""
        error = None if answered.cancelled() else answered.exception()
        if isinstance(error, Refused):
            if self._group_commit.close_request(request) and not request.done.done():
                request.done.set_result(FinishReason.REJECTED)
        elif answered.cancelled() or error is not None:
            self._abort([request.id])
            if not request.is_closed:
                self._group_commit.abort(self.name, [request.id])
        elif request.is_closed and not request.done.done():  # given up before the engine had it
            self._abort([request.id])

    async def _submit(self, batch: list[tuple[OpenRequest, int]]) -> list[Exception | None]:
        answers: list[Exception | None] = [None] * len(batch)
        batch = [
            turn for turn in batch if not turn[0].is_closed
        ]  # the others were given up meanwhile
        if not batch:
            return answers
        ts = [request.trajectory for request, _ in batch]
        ended, self.ended_sessions = self.ended_sessions, set()
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
            seeds=np.array([t.seed for t in ts], np.int64),
            sampling=self._sampling,
            ended_sessions=np.fromiter(ended, np.int64),
        )
        try:
            await self._ref.call(Engine.submit, submit)
        except MeshError:
            self.ended_sessions |= ended  # it may not have heard
            raise
        return answers
