"""Assignment of a trajectory to a shard's engines, from its first turn to its end. It owns the slot
at an engine, the place in the queue, and the open request.

An assignment is entered by `async with`. Any exit of a turn, by an error or a cancellation at any
await, is safe: `release` frees the slot and the place in the queue, and `finish` the remaining
cache. The engine's link, which made the request, closes it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import MeshError, ToolFailed
from meshrl.services.rollout.record.staging import OpenRequest
from meshrl.services.rollout.routing.cmlfq import BucketState
from meshrl.services.rollout.routing.engine_link import EngineLink
from meshrl.services.rollout.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from meshrl.services.rollout.routing.router import Router

MAX_ATTEMPTS = 5  # engines in a row that may fail a request without a new token
MAX_REJECTION_S = 120.0  # longest time of rejections: engines drain and move all the time
NO_ENGINE_S = 2.0  # longer waits mean that no engine exists: an engine backs off for less
TURN, AT_ENGINE = "turn", "engine"  # places of `Router.occupancy`


class AssignmentState(Enum):
    """State of a trajectory between its first turn and its end."""

    UNASSIGNED = "away"  # no engine has a slot for it
    QUEUED = "queued"  # in the queue; an engine may still have its cache
    ASSIGNED = "coming"  # an engine has a slot for it
    RUNNING = "out"  # a request is running; its cache may be on the way
    IDLE = "seated"  # between two turns: the engine keeps its KV cache


class Assignment:
    """Assignment of one trajectory to the engines of a shard."""

    def __init__(self, router: Router, trajectory: Trajectory) -> None:
        self._router = router
        self.trajectory = trajectory
        self.state = AssignmentState.UNASSIGNED
        self.bucket_state = BucketState()  # its bucket of engines, with its history
        self.link: EngineLink | None = None  # where it has a slot
        self.cache_engine = ""  # the engine with its cache, even while unreachable
        self.cache_source: EngineLink | None = None  # the engine that it left, with its cache
        self.balance_target = ""  # the engine chosen by the balancer
        self.request: OpenRequest | None = None  # open request
        self.queue_order: tuple[int, ...] = ()  # place in the queue
        self.queued_at_s = 0.0  # when it entered the queue
        self.placed_future: asyncio.Future[None] | None = None  # while it is in the queue
        self._attempts = 0  # engines that failed since the last token
        self._failing_since_s = 0.0  # time of the first of them
        # of its cache, from engines that it left
        self._cache_moves: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Assignment:
        self._router.add_assignment(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()
        try:
            for move in self._cache_moves:
                move.cancel()
            await asyncio.gather(*self._cache_moves, return_exceptions=True)
        finally:
            self._router.remove_assignment(self)

    def enqueue(self, order: tuple[int, ...]) -> asyncio.Future[None]:
        """Enter the queue; the returned future is done when it is assigned."""
        self.placed_future = asyncio.get_running_loop().create_future()
        self.queue_order, self.queued_at_s = order, self._router.clock.monotonic()
        self.state = AssignmentState.QUEUED
        self._router.enqueue(self)
        return self.placed_future

    def assign(self, link: EngineLink) -> None:
        """Assign a slot at an engine, and release the one at another engine."""
        self._dequeue()
        if self.link is not link:
            self._release_slot()
        self.link, self.cache_engine, self.state = link, link.name, AssignmentState.ASSIGNED
        link.assign(self)

    def release(self) -> None:
        """Release its slot or place in the queue; its cache stays until it is released."""
        self._dequeue()
        self._release_slot()
        self.cache_engine, self.balance_target, self.state = "", "", AssignmentState.UNASSIGNED

    def finish(self) -> None:
        """Finish the assignment: release the slot, and the cache at its engine."""
        self.release()
        self._release_cache()
        self._router.dispatch()

    def mark_engine_lost(self) -> None:
        if self.state in (AssignmentState.IDLE, AssignmentState.QUEUED):
            self.link = None
        if self.state is AssignmentState.IDLE:
            self.state = AssignmentState.UNASSIGNED

    def _dequeue(self) -> None:
        placed, self.placed_future = self.placed_future, None
        if placed is not None:
            self._router.dequeue(self)
            if not placed.done():
                placed.set_result(None)

    def _release_slot(self) -> None:
        if self.link is not None:
            self.link.unassign(self)
            self._release_cache()
            self.cache_source, self.link = self.link, None

    def _release_cache(self) -> None:
        """Release the cache at the engine that it left."""
        source, self.cache_source = self.cache_source, None
        if source is not None:
            source.ended_sessions.add(self.trajectory.id)

    async def generate(self, max_length: int) -> FinishReason:
        """Run a turn to its end, up to `max_length` tokens of the trajectory. Use engines with its
        version or a later one.

        Return STOP or LENGTH. Raise ToolFailed if MAX_ATTEMPTS engines in a row failed it without a
        new token, or rejected it for MAX_REJECTION_S.
        """
        self._attempts, self._failing_since_s = 0, 0.0
        with self._measure_time(TURN):
            return await self._generate(max_length)

    async def _generate(self, max_length: int) -> FinishReason:
        try:
            while (finish := self._find_finish(max_length)) is None:
                self.trajectory.stopwatch.enter("queue")
                if self.state is not AssignmentState.ASSIGNED:
                    began = self._router.clock.monotonic()
                    await self._router.place(self)
                    waited_s = self._router.clock.monotonic() - began
                    if self._failing_since_s and waited_s > NO_ENGINE_S:
                        self._failing_since_s += waited_s
                length = self.trajectory.length
                with self._measure_time(AT_ENGINE):
                    await self._move_cache()
                    finish = await self._attempt_turn(max_length - length)
                if finish in (FinishReason.STOP, FinishReason.LENGTH):
                    self.state = AssignmentState.IDLE
                    return finish
                self._change_engine(finish, grew=self.trajectory.length > length)
            return finish
        finally:
            self.balance_target = ""
            if self.state not in (AssignmentState.UNASSIGNED, AssignmentState.IDLE):
                self.release()
            self._router.dispatch()

    def _measure_time(self, place: str) -> AbstractContextManager[None]:
        """Measure the trajectory's time within the block, except in an evaluation."""
        return (
            self._router.occupancy.occupy(place) if self.trajectory.is_recorded else nullcontext()
        )

    def _find_finish(self, max_length: int) -> FinishReason | None:
        """Return the finish reason of the turn's current tokens; None if it continues."""
        t = self.trajectory
        if len(t.turn_tokens) and int(t.tokens[-1]) in self._router.stop_token_ids:
            # in the ledger: the engine was lost after its last token arrived
            return FinishReason.STOP
        return FinishReason.LENGTH if t.length >= max_length else None

    async def _move_cache(self) -> None:
        """Move its KV cache to its engine while the request runs, where that helps."""
        source, link = self.cache_source, self.link
        assert link is not None
        if source is link:
            self.cache_source = None
        elif source is not None and source.version >= 0:  # it may serve nothing more
            choice = link.get_move_costs(source).choose_action(self.trajectory.length)
            self._router.cache_actions[choice.action] += 1
            if choice.action == "move":
                self.cache_source = None  # released when the transfer has ended
                moving = self._run_cache_move(link, source)
                task = asyncio.get_running_loop().create_task(moving, name="cache move")
                self._cache_moves.add(task)
                task.add_done_callback(self._cache_moves.discard)
                await asyncio.sleep(0)  # the engine must receive the fetch before the request
        self._release_cache()

    async def _run_cache_move(self, link: EngineLink, source: EngineLink) -> None:
        try:
            with suppress(MeshError):  # the engine recomputes what did not arrive
                await link.fetch_cache(self.trajectory, source)
        finally:
            if source not in (self.link, self.cache_source):
                source.ended_sessions.add(self.trajectory.id)

    async def _attempt_turn(self, max_new_tokens: int) -> FinishReason:
        assert self.link is not None
        if not self._router.can_serve(self.link):
            return FinishReason.REJECTED  # lost while a cache was being moved to it
        if successor := self._router.find_successor(self.link):
            self.balance_target = successor
            return FinishReason.ABORTED
        self.state = AssignmentState.RUNNING
        self.trajectory.stopwatch.enter("prefill")
        try:
            return await self.link.generate(self, max_new_tokens)
        except MeshError:
            return FinishReason.ABORTED

    def _change_engine(self, finish: FinishReason, grew: bool) -> None:
        """Leave an engine that did not finish the turn, for the balancer's target if it has room.
        Raise ToolFailed after too many failures.
        """
        link, target = self.link, self.balance_target
        assert link is not None
        self.release()
        if grew:
            self._attempts, self._failing_since_s = 0, 0.0
        if target:
            self._router.rebalanced_trajectories += 1
            to = self._router.find_target(target, self.trajectory.version)
            if to is not None:
                self.assign(to)
        else:
            self._router.continued_trajectories += 1
            link.back_off()
            self._count_failure(finish)
        self._router.dispatch()

    def _count_failure(self, finish: FinishReason) -> None:
        """Count an engine that did not finish a turn; raise ToolFailed after too many. Engines of a
        paused job do not count.
        """
        if self._router.clock.is_paused:
            return
        now = self._router.clock.monotonic()
        identity = self.trajectory.id
        self._failing_since_s = self._failing_since_s or now
        if finish is FinishReason.REJECTED:
            if now - self._failing_since_s > MAX_REJECTION_S:
                raise ToolFailed(
                    f"engines have rejected trajectory {identity} for {MAX_REJECTION_S:.0f} s",
                    fix="Read the engines' logs",
                )
            return
        self._attempts += 1
        if self._attempts >= MAX_ATTEMPTS:
            raise ToolFailed(
                f"{MAX_ATTEMPTS} engines in a row failed to serve trajectory {identity}",
                fix="Read the engines' logs for the request that they cannot serve",
            )
