"""Turns of the model: each to an engine, and on to another one when that goes or another is better.

What goes where is decided in `routing.py` (a request's engine), `cmlfq.py` (its bucket of engines)
and `balance.py` (what changes engine while it waits or runs).
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.api.engine import Sampling
from common.errors import MeshError, ToolFailed
from common.mesh import Mesh
from services.rollout import balance
from services.rollout.cmlfq import Scheduler
from services.rollout.lengths import Lengths
from services.rollout.link import (
    ABORTED,
    LENGTH,
    NO_VERSION,
    REFUSED,
    STOP,
    EngineLink,
    TokenSink,
    Turn,
)
from services.rollout.routing import Bucket, EngineLoad, Waiting, assign, choose, next_up
from services.rollout.trajectory import Trajectory

ATTEMPTS = 5  # engines in a row may take a request and fail it without one new token;
PATIENCE_S = 120.0  # for so long they may refuse it: engines drain and move as a matter of course
AWAY_S = 2.0  # who waits longer finds no engine: that is no refusal, an engine rests for less
PLACE_S = 24 * 3600.0  # a trajectory may wait so long for an engine: spot capacity can be away
LOOK_AHEAD = 64  # of the queue: so many may go before its head when an engine holds what they need
BALANCE_S = 1.0  # between two looks at what could move (RLBoost's manager polls as often)


@dataclass(slots=True)
class Queued:
    """A trajectory that waits for an engine."""

    order: tuple[int, ...]
    trajectory: Trajectory
    engine: asyncio.Future[EngineLink]
    since: float


class Router:
    """Engines of the job as the registry shows them, and the trajectories that wait for one.

    `seats`: trajectories whose keys and values an engine holds.
    """

    def __init__(
        self,
        mesh: Mesh,
        sink: TokenSink,
        sampling: Sampling,
        seats: int,
        scheduler: Scheduler | None = None,
    ) -> None:
        self._mesh, self._sink, self._sampling, self._seats = mesh, sink, sampling, seats
        self.scheduler = scheduler or Scheduler([Bucket(1 << 30, seats)], 1, Lengths())
        self.links: dict[str, EngineLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lineage = 0  # that the job is in
        self._queue: list[Queued] = []  # in the order of their turn
        self._lack = ExitStack()  # holds the wait that is published while no engine may serve them
        self._arrivals = 0
        self._sent: dict[int, str] = {}  # trajectories that the balancer moves -> engine
        self._balanced_at = mesh.clock.monotonic()
        self._left: dict[int, EngineLink] = {}  # trajectory -> where its cache still is
        self.brought: Counter[str] = Counter()  # what became of caches: move, recompute
        self.continued = 0  # trajectories that went on elsewhere after their engine failed
        self.moved = 0  # and those that went because it was better

    @property
    def capacity(self) -> int:
        """Trajectories that all engines together may hold."""
        return self._seats * len(self.links)

    @property
    def idle(self) -> int:
        """Requests that all engines together could take now, beyond those that wait."""
        room = sum(max(0, link.bound - len(link.out)) for link in self.links.values())
        return room - len(self._queue)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # -- engines ---------------------------------------------------------------------------------

    def observe(self, alive: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the engines that are alive and ready now, with what they publish; an engine tells
        its version itself.
        """
        for name in self.links.keys() - alive.keys():
            self._tasks[name].cancel()
        for name in sorted(alive.keys() - self.links.keys()):
            self._connect(name)
        buckets = self.scheduler.buckets
        degrees = {name: int(alive[name].get("tensor_parallel", 1)) for name in alive}
        for name, bucket in assign(degrees, buckets).items():
            link = self.links[name]
            link.bucket, link.batch = bucket, min(buckets[bucket].batch, self._seats)
            link.published(alive[name])
            link.listen()
        self.dispatch()  # one that rested may serve again
        self._tell()
        now = self._mesh.clock.monotonic()
        if now - self._balanced_at >= BALANCE_S:
            self._balanced_at = now
            self._balance()

    def _connect(self, name: str) -> None:
        link = EngineLink(self._mesh, name, self._seats, self._sink, self._sampling, self.dispatch)
        link.lineage = self._lineage
        self.links[name] = link
        task = asyncio.get_running_loop().create_task(link.run(), name=f"link {name}")
        self._tasks[name] = task
        task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self.links[name], self._tasks[name]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MeshError):  # a lost peer: its requests are already moving
            self._mesh.telemetry.log.info("engine", name=name, error=str(error))
        elif error is not None:
            self._mesh.host.exit(70, f"{self._mesh.name} cannot read from {name}: {error!r}")

    def enter(self, lineage: int) -> None:
        """The job is in another lineage: engines that serve an earlier one get no more turns."""
        self._lineage = lineage
        for link in self.links.values():
            link.lineage = lineage
        self.dispatch()

    def _tell(self) -> None:
        """Publishes that trajectories wait for an engine that is not there: none has their version.
        To wait for room is no news.
        """
        self._lack.close()
        newest = max(self.links.values(), key=lambda link: link.version, default=None)
        version = NO_VERSION if newest is None else newest.version
        lacking = [q for q in self._queue if q.trajectory.version > version]
        if lacking:
            wanted = min(q.trajectory.version for q in lacking)
            on = "an engine" if newest is None else newest.name
            since = min(q.since for q in lacking)
            self._lack.enter_context(
                self._mesh.waits.wait(f"an engine at version {wanted}", on, since)
            )

    def _loads(self) -> list[EngineLoad]:
        return [link.load for link in self.links.values()]

    # -- turns -----------------------------------------------------------------------------------

    async def generate(self, turn: Callable[[], Turn]) -> int:
        """Runs a turn to its end on whatever engines have its trajectory's version or a later one;
        STOP or LENGTH.

        `turn` is asked again after an engine failed, since the trajectory has grown. ToolFailed
        when ATTEMPTS engines in a row failed it without a new token, or refused it for PATIENCE_S.
        """
        link: EngineLink | None = None
        while True:
            request = turn()
            t = request.trajectory
            if len(t.turn) and int(t.tokens[-1]) in self._sampling.stop:
                return STOP  # in the ledger: the engine went with its last token delivered
            if request.max_new <= 0:
                return LENGTH
            if link is None:
                link = await self._place(t)
            await self._bring(t, link)
            length = t.length
            finish = await self._attempt(link, request)
            link.out.discard(t.id)
            target = self._sent.pop(t.id, "")
            if finish in (STOP, LENGTH):
                t.attempts, t.failing_since = 0, 0.0
                self.dispatch()
                return finish
            self._leave(t, link)
            if target:
                self.moved += 1
                link = self._taken(t, target)
            else:
                self.continued += 1
                link.rest()
                self._failed(t, finish, grew=t.length > length)
                link = None
            self.dispatch()

    def _taken(self, t: Trajectory, name: str) -> EngineLink | None:
        """The engine that the balancer meant, if it still has room."""
        link = self.links.get(name)
        fits = link is not None and link.load.room and link.load.version >= t.version
        return self._assign(t, name) if fits else None

    async def _attempt(self, link: EngineLink, request: Turn) -> int:
        """The finish code of a request on one engine."""
        if not self._serves(link):
            return REFUSED  # it went while a cache was on its way there
        try:
            return await link.generate(request)
        except MeshError:
            return ABORTED

    def _failed(self, t: Trajectory, finish: int, grew: bool) -> None:
        """Counts an engine that did not finish a turn; ToolFailed when that makes too many."""
        now = self._mesh.clock.monotonic()
        if grew or not t.failing_since:
            t.attempts, t.failing_since = 0, now
        if finish == REFUSED:
            if now - t.failing_since > PATIENCE_S:
                raise ToolFailed(
                    f"engines have refused trajectory {t.id} for {PATIENCE_S:.0f} s",
                    fix="see the engines' logs",
                )
            return
        t.attempts += 1
        if t.attempts >= ATTEMPTS:
            raise ToolFailed(
                f"{ATTEMPTS} engines in a row failed trajectory {t.id}",
                fix="see the engines' logs for the request that they cannot serve",
            )

    async def _place(self, t: Trajectory) -> EngineLink:
        request = self._request(t)
        home = self.links.get(t.engine)  # most turns go on there: no need to look at all engines
        name = choose([home.load], request) if home is not None else None
        name = name or choose(self._loads(), request)
        if name is not None and (name == t.engine or not self._queue):
            return self._assign(t, name)
        self._arrivals += 1
        order = (*self.scheduler.order(t), self._arrivals)
        began = self._mesh.clock.monotonic()
        queued = Queued(order, t, asyncio.get_running_loop().create_future(), began)
        insort(self._queue, queued, key=lambda q: q.order)
        async with self._mesh.clock.timeout(PLACE_S, "an engine for a trajectory"):
            link = await queued.engine
        waited_s = self._mesh.clock.monotonic() - began
        if t.failing_since and waited_s > AWAY_S:
            t.failing_since += waited_s
        return link

    def _request(self, t: Trajectory) -> Waiting:
        return Waiting(t.version, t.engine, self._bucket(t))

    def _bucket(self, t: Trajectory) -> int:
        """The trajectory's bucket, or the nearest, rather longer, one that has an engine now."""
        wanted = self.scheduler.bucket(t)
        served = {link.bucket for link in self.links.values() if link.version >= t.version}
        return min(served, key=lambda b: (abs(b - wanted), -b), default=wanted)

    def _assign(self, t: Trajectory, name: str) -> EngineLink:
        if t.engine != name and t.engine in self.links:
            self._leave(t, self.links[t.engine])
        link = self.links[name]
        link.held.add(t.id)
        link.out.add(t.id)
        link.ended.discard(t.id)  # of an earlier stay there
        t.engine = name
        return link

    def _leave(self, t: Trajectory, link: EngineLink) -> None:
        """The trajectory goes on elsewhere: its seat here is free, its cache stays for a while."""
        link.held.discard(t.id)
        self._forget(t)
        self._left[t.id] = link
        t.engine = ""

    def _forget(self, t: Trajectory) -> None:
        """No engine needs to keep what the trajectory left behind."""
        source = self._left.pop(t.id, None)
        if source is not None:
            source.ended.add(t.id)

    async def _bring(self, t: Trajectory, link: EngineLink) -> None:
        """Brings a trajectory's keys and values along to `link`, if that is cheaper than computing
        them again; its request begins afterwards.
        """
        source = self._left.get(t.id)
        if source is link:
            del self._left[t.id]
        elif source is not None and self._serves(source):
            choice = link.costs(source).choose(t.length, t.length)
            self.brought[choice.answer] += 1
            if choice.answer == "move":
                with suppress(MeshError):  # it computes what did not come
                    await link.fetch(t, source)
        self._forget(t)

    def _serves(self, link: EngineLink) -> bool:
        return self.links.get(link.name) is link and link.load.version >= 0

    def dispatch(self) -> None:
        """Gives room that has opened to those who wait."""
        self._queue = [q for q in self._queue if not q.engine.done()]
        while self._queue:
            first = self._queue[:LOOK_AHEAD]
            requests = [self._request(q.trajectory) for q in first]
            found = next_up(requests, self._loads())
            if found is None:
                return
            index, name = found
            queued = self._queue.pop(index)
            queued.engine.set_result(self._assign(queued.trajectory, name))

    # -- what changes engine ---------------------------------------------------------------------

    def returned(self, t: Trajectory) -> None:
        """A tool has answered the trajectory: it may belong to another bucket now."""
        decision = self.scheduler.returned(t)
        if decision.outcome == "causal_signal_agree":
            home = self.links.get(t.engine)
            if home is not None and home.bucket != self._bucket(t):
                self._leave(t, home)
                self.dispatch()
            self._mesh.telemetry.log.info(
                "bucket", trajectory=t.id, bucket=decision.bucket, reason=decision.reason
            )

    def _balance(self) -> None:
        """Asks engines to let go of requests that are better off elsewhere."""
        for move in balance.balance([link.whole for link in self.links.values()], floor=0):
            source = self.links[move.source]
            for t in source.movable(source.share(move.count), move.pending):
                if t.id not in self._sent and self.links[move.target].version >= t.version:
                    self._sent[t.id] = move.target
                    source.let_go(t)

    def release(self, t: Trajectory) -> None:
        """The trajectory has ended: its seat goes to the next."""
        link = self.links.get(t.engine)
        if link is not None:
            self._leave(t, link)
        self._forget(t)
        t.engine = ""
        self.dispatch()

    @property
    def stats(self) -> dict[str, Any]:
        """What the live view shows of routing."""
        return {
            "continued": self.continued,
            "moved": self.moved,
            "caches": dict(self.brought),
            "decisions": dict(self.scheduler.outcomes),
            "buckets": {link.name: link.bucket for link in self.links.values()},
        }

    async def close(self) -> None:
        self._lack.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
