"""A trajectory's stay at a shard's engines, from its first turn to its end: the one object that
knows which engine has a place for it, what it waits for, and what of it is out.

A stay is entered by `async with`. Whatever ends a turn in between, an error or a cancellation at
any await: `leave` gives back the seat and the place in the queue, and `end` what is left of its
cache. The request is given back by the engine's link, which made it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import MeshError, ToolFailed
from meshrl.services.rollout.record.staging import OpenRequest
from meshrl.services.rollout.routing.cmlfq import Course
from meshrl.services.rollout.routing.engine_link import EngineLink
from meshrl.services.rollout.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from meshrl.services.rollout.routing.router import Router

ATTEMPTS = 5  # engines in a row may take a request and fail it without one new token;
PATIENCE_S = 120.0  # longest time that engines may refuse it: they drain and move all the time
AWAY_S = 2.0  # who waits longer finds no engine: that is no refusal, an engine rests for less
TURN, AT_ENGINE = "turn", "engine"  # places of `Router.spent`


class Whereabouts(Enum):
    """Where a trajectory is between its first turn and its end."""

    AWAY = "away"  # no engine has a place for it
    QUEUED = "queued"  # it waits for one; an engine may still keep its cache
    COMING = "coming"  # an engine has a place for it
    OUT = "out"  # a request of it is out; its cache may be on the way there
    SEATED = "seated"  # between two turns: the engine keeps its keys and values


class Stay:
    """One trajectory at the engines of a shard."""

    def __init__(self, engines: Router, trajectory: Trajectory) -> None:
        self._engines = engines
        self.trajectory = trajectory
        self.whereabouts = Whereabouts.AWAY
        self.course = Course()  # its bucket of engines, and how it got there
        self.link: EngineLink | None = None  # where it has a seat
        self.home = ""  # the engine that holds its cache, also while that cannot be reached
        self.source: EngineLink | None = None  # the engine that it left, with its cache
        self.target = ""  # the engine that the balancer means it for
        self.request: OpenRequest | None = None  # while one is out
        self.order: tuple[int, ...] = ()  # place in the queue
        self.since = 0.0  # when it came into the queue
        self.placed: asyncio.Future[None] | None = None  # while it is in the queue
        self._attempts = 0  # engines that failed since the last token
        self._failing_since = 0.0  # when the first of them was
        self._moves: set[asyncio.Task[None]] = set()  # of its cache, from engines that it left

    async def __aenter__(self) -> Stay:
        self._engines.joined(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        try:
            for move in self._moves:
                move.cancel()
            await asyncio.gather(*self._moves, return_exceptions=True)
        finally:
            self._engines.parted(self)

    def queued(self, order: tuple[int, ...]) -> asyncio.Future[None]:
        """Stands in the queue from now on; the future is done when it has a place."""
        self.placed = asyncio.get_running_loop().create_future()
        self.order, self.since = order, self._engines.clock.monotonic()
        self.whereabouts = Whereabouts.QUEUED
        self._engines.enqueue(self)
        return self.placed

    def take(self, link: EngineLink) -> None:
        """Takes a place at an engine, and leaves the one that it had elsewhere."""
        self._stop_waiting()
        if self.link is not link:
            self._vacate()
        self.link, self.home, self.whereabouts = link, link.name, Whereabouts.COMING
        link.take(self)

    def leave(self) -> None:
        """Gives back what it has or waits for; its cache stays behind until it is forgotten."""
        self._stop_waiting()
        self._vacate()
        self.home, self.target, self.whereabouts = "", "", Whereabouts.AWAY

    def end(self) -> None:
        """No further turn follows: its seat goes to the next, and no engine needs its cache."""
        self.leave()
        self._forget()
        self._engines.dispatch()

    def lost(self) -> None:
        if self.whereabouts in (Whereabouts.SEATED, Whereabouts.QUEUED):
            self.link = None
        if self.whereabouts is Whereabouts.SEATED:
            self.whereabouts = Whereabouts.AWAY

    def _stop_waiting(self) -> None:
        placed, self.placed = self.placed, None
        if placed is not None:
            self._engines.unqueue(self)
            if not placed.done():
                placed.set_result(None)

    def _vacate(self) -> None:
        if self.link is not None:
            self.link.free(self)
            self._forget()
            self.source, self.link = self.link, None

    def _forget(self) -> None:
        """No engine needs to keep what it left behind."""
        source, self.source = self.source, None
        if source is not None:
            source.ended.add(self.trajectory.id)

    async def generate(self, limit: int) -> Finish:
        """Runs a turn to its end, at `limit` tokens of the trajectory at most, on whatever engines
        have its version or a later one; STOP or LENGTH.

        ToolFailed when ATTEMPTS engines in a row failed it without a new token, or refused it for
        PATIENCE_S.
        """
        self._attempts, self._failing_since = 0, 0.0
        with self._counted(TURN):
            return await self._generate(limit)

    async def _generate(self, limit: int) -> Finish:
        try:
            while (finish := self._ended(limit)) is None:
                self.trajectory.watch.enter("queue")
                if self.whereabouts is not Whereabouts.COMING:
                    began = self._engines.clock.monotonic()
                    await self._engines.place(self)
                    waited_s = self._engines.clock.monotonic() - began
                    if self._failing_since and waited_s > AWAY_S:
                        self._failing_since += waited_s
                length = self.trajectory.length
                with self._counted(AT_ENGINE):
                    await self._bring()
                    finish = await self._attempt(limit - length)
                if finish in (Finish.STOP, Finish.LENGTH):
                    self.whereabouts = Whereabouts.SEATED
                    return finish
                self._go_on(finish, grew=self.trajectory.length > length)
            return finish
        finally:
            self.target = ""
            if self.whereabouts not in (Whereabouts.AWAY, Whereabouts.SEATED):
                self.leave()
            self._engines.dispatch()

    def _counted(self, place: str) -> AbstractContextManager[None]:
        """The trajectory's time within the block counts, unless it is one of an evaluation."""
        return self._engines.spent.within(place) if self.trajectory.recorded else nullcontext()

    def _ended(self, limit: int) -> Finish | None:
        """How the turn has ended, with what has come of it by now; None: it goes on."""
        t = self.trajectory
        if len(t.turn) and int(t.tokens[-1]) in self._engines.stop:
            return Finish.STOP  # in the ledger: the engine went with its last token delivered
        return Finish.LENGTH if t.length >= limit else None

    async def _bring(self) -> None:
        """Has its keys and values come after it while its request is computed, where that helps."""
        source, link = self.source, self.link
        assert link is not None
        if source is link:
            self.source = None
        elif source is not None and self._engines.serves(source):
            choice = link.costs(source).choose(self.trajectory.length)
            self._engines.caches[choice.answer] += 1
            if choice.answer == "move":
                self.source = None  # it is let go of when nothing more comes
                moving = self._moved(link, source)
                task = asyncio.get_running_loop().create_task(moving, name="cache move")
                self._moves.add(task)
                task.add_done_callback(self._moves.discard)
                await asyncio.sleep(0)  # the engine hears of it before it has the request
        self._forget()

    async def _moved(self, link: EngineLink, source: EngineLink) -> None:
        try:
            with suppress(MeshError):  # it computes what did not come
                await link.fetch(self.trajectory, source)
        finally:
            if source not in (self.link, self.source):
                source.ended.add(self.trajectory.id)

    async def _attempt(self, max_new: int) -> Finish:
        assert self.link is not None
        if not self._engines.serves(self.link):
            return Finish.REFUSED  # it went while a cache was on its way there
        self.whereabouts = Whereabouts.OUT
        self.trajectory.watch.enter("prefill")
        try:
            return await self.link.generate(self, max_new)
        except MeshError:
            return Finish.ABORTED

    def _go_on(self, finish: Finish, grew: bool) -> None:
        """Leaves an engine that did not finish the turn, for the one that the balancer meant if it
        still has room; ToolFailed when too many have failed.
        """
        link, target = self.link, self.target
        assert link is not None
        self.leave()
        if grew:
            self._attempts, self._failing_since = 0, 0.0
        if target:
            self._engines.moved += 1
            to = self._engines.sent_to(target, self.trajectory.version)
            if to is not None:
                self.take(to)
        else:
            self._engines.continued += 1
            link.failed()
            self._failed(finish)
        self._engines.dispatch()

    def _failed(self, finish: Finish) -> None:
        """Counts an engine that did not finish a turn; ToolFailed when that makes too many. The
        engines of a job that is paused were taken from it.
        """
        if self._engines.clock.held:
            return
        now = self._engines.clock.monotonic()
        identity = self.trajectory.id
        self._failing_since = self._failing_since or now
        if finish is Finish.REFUSED:
            if now - self._failing_since > PATIENCE_S:
                raise ToolFailed(
                    f"engines have refused trajectory {identity} for {PATIENCE_S:.0f} s",
                    fix="see the engines' logs",
                )
            return
        self._attempts += 1
        if self._attempts >= ATTEMPTS:
            raise ToolFailed(
                f"{ATTEMPTS} engines in a row failed trajectory {identity}",
                fix="see the engines' logs for the request that they cannot serve",
            )
