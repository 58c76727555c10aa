"""The router: sends each turn to an engine, and on to another when that goes or another is better.

What goes where is decided in `queues.py` (a request's engine), `cmlfq.py` (its bucket of engines)
and `balance.py` (what changes engine while it waits or runs).
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from meshrl.common.api.engine import Sampling
from meshrl.common.api.stats import RoutingStats
from meshrl.common.base.errors import MeshError
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.routing import balance
from meshrl.services.rollout.routing.cmlfq import Scheduler
from meshrl.services.rollout.routing.degree_buckets import MeasuredEngine
from meshrl.services.rollout.routing.engine_link import NO_VERSION, EngineLink, SeenEngine
from meshrl.services.rollout.routing.lengths import LengthTrees
from meshrl.services.rollout.routing.queues import (
    EngineLoad,
    LengthBucket,
    QueuedRequest,
    assign,
    next_up,
    place,
    served,
)
from meshrl.services.rollout.routing.stay import Stay
from meshrl.services.rollout.trajectories.trajectory import Trajectory

PLACE_S = 24 * 3600.0  # a trajectory may wait so long for an engine: spot capacity can be away
LOOK_AHEAD = 64  # requests that may overtake the queue's head when an engine holds their cache
BALANCE_S = 1.0  # between two looks at what could move (RLBoost's manager polls as often)


class Router:
    """Engines of the job as the registry shows them, and the trajectories that stay with them.

    `seats`: trajectories whose keys and values an engine holds.
    """

    def __init__(
        self,
        mesh: Mesh,
        sink: GroupCommit,
        sampling: Sampling,
        seats: int,
        scheduler: Scheduler | None = None,
    ) -> None:
        self._mesh, self._sink, self._sampling, self._seats = mesh, sink, sampling, seats
        self.clock = mesh.job_clock
        self.spent = Occupancy(self.clock.monotonic)
        self.stop = frozenset(sampling.stop)
        self.scheduler = scheduler or Scheduler([LengthBucket(1 << 30, seats)], 1, LengthTrees())
        self.links: dict[str, EngineLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lineage = 0  # the job's current lineage
        self.stays: dict[int, Stay] = {}  # by trajectory
        self._queue: list[Stay] = []  # in the order of their turn
        self._lack = ExitStack()  # holds the wait that is published while no engine may serve them
        self._arrivals = 0
        self._balanced_at = self.clock.monotonic()
        self.caches: Counter[str] = Counter()  # what became of them: move, recompute
        self.continued = 0  # trajectories that went on elsewhere after their engine failed
        self.moved = 0  # moves made because another engine was better

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

    def observe(self, alive: Mapping[str, SeenEngine]) -> None:
        """Takes the engines that are alive and ready now, with what they publish; an engine tells
        its version itself.
        """
        for name in self.links.keys() - alive.keys():
            self._tasks[name].cancel()
        for name in sorted(alive.keys() - self.links.keys()):
            self._connect(name)
        degrees = {name: seen.stats.tensor_parallel for name, seen in alive.items()}
        measured = {
            name: MeasuredEngine(degrees[name], seen.stats.tokens, seen.stats.busy_s)
            for name, seen in alive.items()
        }
        if self.scheduler.follow(measured):
            for stay in self.stays.values():
                self.scheduler.restored(stay.trajectory, stay.course)
            for stay in self._queue:
                stay.order = (*self._turn(stay), stay.order[-1])
            self._queue.sort(key=lambda stay: stay.order)
        buckets = self.scheduler.buckets
        for name, bucket in assign(degrees, buckets).items():
            link = self.links[name]
            link.bucket, link.batch = bucket, min(buckets[bucket].batch, self._seats)
            link.published(alive[name])
            link.listen()
        self.dispatch()  # one that rested may serve again
        self._tell()
        now = self.clock.monotonic()
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
            self._mesh.host.exit(70, f"{self._mesh.name} cannot read from {name}: {error!r}", error)

    def enter(self, lineage: int) -> None:
        self._lineage = lineage
        for link in self.links.values():
            link.lineage = lineage
        self.dispatch()

    def _tell(self) -> None:
        """Publishes that trajectories wait for an engine that is not there: none has their version.
        To wait for room is no news, and a job that is paused waits for nobody.
        """
        self._lack.close()
        if self.clock.held:
            return
        newest = max(self.links.values(), key=lambda link: link.version, default=None)
        version = NO_VERSION if newest is None else newest.version
        lacking = [stay for stay in self._queue if stay.trajectory.version > version]
        if lacking:
            wanted = min(stay.trajectory.version for stay in lacking)
            on = "an engine" if newest is None else newest.name
            waited_s = self.clock.monotonic() - min(stay.since for stay in lacking)
            waits = self._mesh.waits
            self._lack.enter_context(
                waits.wait(f"an engine at version {wanted}", on, waits.began(waited_s))
            )

    def _loads(self) -> list[EngineLoad]:
        return [link.load for link in self.links.values()]

    # -- what a stay asks ------------------------------------------------------------------------

    def stay(self, t: Trajectory) -> Stay:
        """A trajectory's stay, to be entered while it may have turns."""
        return Stay(self, t)

    def joined(self, stay: Stay) -> None:
        t = stay.trajectory
        self.stays[t.id] = stay
        if t.past_turns or t.open_turn is not None:
            self.scheduler.restored(t, stay.course)

    def parted(self, stay: Stay) -> None:
        del self.stays[stay.trajectory.id]

    async def place(self, stay: Stay) -> None:
        request = self._request(stay)
        link = self.links.get(stay.home)  # most turns go on there: no need to look at all engines
        home = link.load if link is not None else None
        if name := place(request, home, self._loads, bool(self._queue)):
            return stay.take(self.links[name])
        self._arrivals += 1
        placed = stay.queued((*self._turn(stay), self._arrivals))
        async with self.clock.timeout(PLACE_S, "an engine for a trajectory"):
            await placed

    def enqueue(self, stay: Stay) -> None:
        insort(self._queue, stay, key=lambda s: s.order)

    def unqueue(self, stay: Stay) -> None:
        self._queue.remove(stay)

    def serves(self, link: EngineLink) -> bool:
        return self.links.get(link.name) is link and link.load.version >= 0

    def sent_to(self, name: str, version: int) -> EngineLink | None:
        link = self.links.get(name)
        fits = link is not None and link.load.room and link.load.version >= version
        return link if fits else None

    def dispatch(self) -> None:
        while self._queue and any(link.open for link in self.links.values()):
            first = self._queue[:LOOK_AHEAD]
            found = next_up([self._request(stay) for stay in first], self._loads())
            if found is None:
                return
            index, name = found
            first[index].take(self.links[name])

    def _request(self, stay: Stay) -> QueuedRequest:
        return QueuedRequest(stay.trajectory.version, stay.home, self._bucket(stay))

    def _turn(self, stay: Stay) -> tuple[int, ...]:
        return self.scheduler.order(stay.trajectory.id, stay.course.bucket)

    def _bucket(self, stay: Stay) -> int:
        """The stay's bucket, or the nearest, rather longer, one that has an engine now."""
        if len(self.scheduler.buckets) == 1:
            return 0
        version = stay.trajectory.version
        there = {link.bucket for link in self.links.values() if link.version >= version}
        return served(stay.course.bucket, there)

    def returned(self, stay: Stay) -> None:
        """A tool has answered the trajectory: it may belong to another bucket now."""
        decision = self.scheduler.returned(stay.trajectory, stay.course)
        if decision.outcome == "causal_signal_agree":
            home = self.links.get(stay.home)
            if home is not None and home.bucket != self._bucket(stay):
                stay.leave()
                self.dispatch()
            self._mesh.telemetry.log.info(
                "bucket",
                trajectory=stay.trajectory.id,
                bucket=decision.bucket,
                reason=decision.reason,
            )

    def _balance(self) -> None:
        """Asks engines to let go of requests that are better off elsewhere."""
        for move in balance.balance([link.whole for link in self.links.values()], floor=0):
            source, target = self.links[move.source], self.links[move.target]
            for stay in source.movable(source.share(move.count), move.pending):
                if not stay.target and target.version >= stay.trajectory.version:
                    stay.target = move.target
                    source.let_go(stay)

    @property
    def stats(self) -> RoutingStats:
        return RoutingStats(
            continued=self.continued,
            moved=self.moved,
            caches=dict(self.caches),
            decisions=dict(self.scheduler.outcomes),
            buckets={link.name: link.bucket for link in self.links.values()},
        )

    async def close(self) -> None:
        self._lack.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
