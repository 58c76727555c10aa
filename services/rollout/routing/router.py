"""Router: it sends each turn to an engine, and to another one if that is lost or another is better.

`queue_policy.py` chooses a request's engine, `cmlfq.py` its bucket of engines, `load_balancer.py`
the requests that change engines while they wait or run, and `seeding.py` the engines that hand all
of them over.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from meshrl.common.api.engine import SamplingParams
from meshrl.common.api.stats import RoutingStats
from meshrl.common.base.errors import MeshError
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.routing import load_balancer, seeding
from meshrl.services.rollout.routing.assignment import Assignment
from meshrl.services.rollout.routing.cmlfq import BucketScheduler
from meshrl.services.rollout.routing.degree_buckets import MeasuredEngine
from meshrl.services.rollout.routing.engine_link import NO_VERSION, EngineLink, EngineSnapshot
from meshrl.services.rollout.routing.length_trees import LengthTrees
from meshrl.services.rollout.routing.queue_policy import (
    EngineLoad,
    LengthBucket,
    QueuedRequest,
    assign_buckets,
    choose_next,
    find_nearest_bucket,
    place_request,
)
from meshrl.services.rollout.trajectories.trajectory import Trajectory

# limit of a trajectory's wait for an engine: spot capacity may be unavailable
PLACE_TIMEOUT_S = 24 * 3600.0
LOOK_AHEAD = 64  # requests that may overtake the queue's head if an engine has their cache
BALANCE_INTERVAL_S = 1.0  # as often as RLBoost's manager polls


class Router:
    """Router of a job's trajectories to the engines in the registry. `slots`: number of
    trajectories whose KV cache an engine holds.
    """

    def __init__(
        self,
        mesh: Mesh,
        group_commit: GroupCommit,
        sampling: SamplingParams,
        slots: int,
        scheduler: BucketScheduler | None = None,
    ) -> None:
        self._mesh, self._group_commit, self._sampling, self._slots = (
            mesh,
            group_commit,
            sampling,
            slots,
        )
        self.clock = mesh.job_clock
        self.occupancy = Occupancy(self.clock.monotonic)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.scheduler = scheduler or BucketScheduler([LengthBucket(1 << 30, slots)], LengthTrees())
        self.links: dict[str, EngineLink] = {}
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        self._lineage = 0  # the job's current lineage
        self.assignments: dict[int, Assignment] = {}  # by trajectory
        self._queue: list[Assignment] = []  # in order
        self._missing_engine_wait = ExitStack()  # the wait published while no engine may serve them
        self._arrivals = 0
        self._seed_s: float | None = None  # window of engines on the core's workers; None: no limit
        self._window_task: asyncio.Task[None] | None = None  # waits for the end of a window
        self._closed_at_s: dict[str, float] = {}  # of engines that still hand requests over
        self._balanced_at_s = self.clock.monotonic()
        self.cache_actions: Counter[str] = Counter()  # by outcome: move, recompute
        self.continued_trajectories = 0  # trajectories moved after a failure of their engine
        self.rebalanced_trajectories = 0  # moves because another engine was better
        self.handovers, self.handover_s = 0, 0.0  # of closed engines; seconds of the last one

    @property
    def capacity(self) -> int:
        """Slots of all open engines together."""
        return self._slots * len(self._list_open_links())

    @property
    def free_requests(self) -> int:
        """Free requests of all engines together, less the queue."""
        room = sum(
            max(0, link.max_requests - len(link.running_assignments))
            for link in self._list_open_links()
        )
        return room - len(self._queue)

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def update_engines(self, snapshots: Mapping[str, EngineSnapshot]) -> None:
        """Update the engines from the registry: those alive and ready, with their published stats.
        An engine sends its version itself.
        """
        for name in self.links.keys() - snapshots.keys():
            self._link_tasks[name].cancel()
        for name in sorted(snapshots.keys() - self.links.keys()):
            self._connect(name)
        degrees = {name: snapshot.stats.tensor_parallel for name, snapshot in snapshots.items()}
        measured = {
            name: MeasuredEngine(degrees[name], snapshot.stats.tokens, snapshot.stats.busy_s)
            for name, snapshot in snapshots.items()
        }
        if self.scheduler.update_engines(measured):
            for stay in self.assignments.values():
                self.scheduler.restore(stay.trajectory, stay.bucket_state)
            for stay in self._queue:
                stay.queue_order = (*self._compute_order(stay), stay.queue_order[-1])
            self._queue.sort(key=lambda stay: stay.queue_order)
        buckets = self.scheduler.buckets
        for name, bucket in assign_buckets(degrees, buckets).items():
            link = self.links[name]
            link.bucket, link.batch_size = bucket, min(buckets[bucket].batch_size, self._slots)
            link.update_stats(snapshots[name])
            link.publish_silence()
        self._update_windows()
        self.dispatch()  # an engine after its back-off may serve again
        self._publish_wait()
        now = self.clock.monotonic()
        if now - self._balanced_at_s >= BALANCE_INTERVAL_S:
            self._balanced_at_s = now
            self._balance()

    def _connect(self, name: str) -> None:
        link = EngineLink(
            self._mesh, name, self._slots, self._group_commit, self._sampling, self._on_version
        )
        link.lineage = self._lineage
        self.links[name] = link
        task = asyncio.get_running_loop().create_task(link.read_stream(), name=f"link {name}")
        self._link_tasks[name] = task
        task.add_done_callback(partial(self._on_link_end, name))

    def _on_link_end(self, name: str, task: asyncio.Task[None]) -> None:
        if self._link_tasks.get(name) is task:
            del self.links[name], self._link_tasks[name]
            self._update_windows()  # without another engine, closed ones open
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MeshError):  # a lost peer: its requests are already moving
            self._mesh.telemetry.log.info("engine", name=name, error=str(error))
        elif error is not None:
            self._mesh.host.exit(70, f"{self._mesh.name} cannot read from {name}: {error!r}", error)

    def enter_lineage(self, lineage: int) -> None:
        self._lineage = lineage
        for link in self.links.values():
            link.lineage = lineage
        self.dispatch()

    def _on_version(self) -> None:
        self._update_windows()
        self.dispatch()

    # -- seeding -----------------------------------------------------------------------------------

    def set_seeding(self, seed_s: float | None) -> None:
        """Set the window of engines that share the core's workers, seconds; None: no limit."""
        if seed_s != self._seed_s:
            self._seed_s = seed_s
            self._update_windows()

    def _list_open_links(self) -> list[EngineLink]:
        return [link for link in self.links.values() if not link.is_closed]

    def _update_windows(self) -> None:
        """Close the engines whose window has ended, and open the others."""
        engines = [link.seeding for link in self.links.values()]
        closed = seeding.list_closed(engines, self._seed_s)
        for link in self.links.values():
            if link.name in closed and not link.is_closed and link.running_assignments:
                self._closed_at_s[link.name] = self.clock.monotonic()
            link.is_closed = link.name in closed
        for name in closed:
            self._hand_over(self.links[name])
        wait_s = seeding.compute_wait_s(engines, self._seed_s)
        if self._window_task is not None:
            self._window_task.cancel()
            self._window_task = None
        if wait_s is not None:
            waiting = self._update_windows_later(wait_s)
            self._window_task = asyncio.get_running_loop().create_task(waiting, name="seeding")

    async def _update_windows_later(self, wait_s: float) -> None:
        await self._mesh.clock.sleep(wait_s)
        self._window_task = None  # this task is not to be cancelled
        self._update_windows()
        self.dispatch()

    def _hand_over(self, link: EngineLink) -> None:
        """Abort an engine's requests; they continue at other engines after their last tokens."""
        leaving = [
            stay
            for stay in link.running_assignments
            if stay.request is not None and not stay.balance_target
        ]
        for stay, target in zip(leaving, self._choose_open(len(leaving)), strict=False):
            stay.balance_target = target
        link.abort_requests(stay for stay in leaving if stay.balance_target)

    def _choose_open(self, count: int) -> list[str]:
        others = [one.total_load for one in self._list_open_links() if one.load.version >= 0]
        return seeding.choose_targets(count, others)

    def find_successor(self, link: EngineLink) -> str:
        """Return the engine for a request that has a slot at a closed one; empty: it may stay."""
        return next(iter(self._choose_open(1)), "") if link.is_closed else ""

    def _record_handovers(self) -> None:
        for name, closed_at_s in list(self._closed_at_s.items()):
            link = self.links.get(name)
            if link is None or not link.is_closed:
                del self._closed_at_s[name]
            elif not link.running_assignments:
                del self._closed_at_s[name]
                self.handovers += 1
                self.handover_s = self.clock.monotonic() - closed_at_s

    # -- waits -------------------------------------------------------------------------------------

    def _publish_wait(self) -> None:
        """Publish that trajectories wait for an engine with their version. Waiting for capacity is
        not published, nor the wait of a paused job.
        """
        self._missing_engine_wait.close()
        if self.clock.is_paused:
            return
        newest = max(self.links.values(), key=lambda link: link.version, default=None)
        version = NO_VERSION if newest is None else newest.version
        lacking = [stay for stay in self._queue if stay.trajectory.version > version]
        if lacking:
            required_version = min(stay.trajectory.version for stay in lacking)
            on = "an engine" if newest is None else newest.name
            waited_s = self.clock.monotonic() - min(stay.queued_at_s for stay in lacking)
            waits = self._mesh.waits
            self._missing_engine_wait.enter_context(
                waits.wait(
                    f"an engine at version {required_version}", on, waits.compute_start(waited_s)
                )
            )

    def _collect_loads(self) -> list[EngineLoad]:
        return [link.load for link in self.links.values()]

    # -- calls of an assignment --------------------------------------------------------------------

    def create_assignment(self, trajectory: Trajectory) -> Assignment:
        """Create a trajectory's assignment, to be entered while it may have turns."""
        return Assignment(self, trajectory)

    def add_assignment(self, assignment: Assignment) -> None:
        t = assignment.trajectory
        self.assignments[t.id] = assignment
        if t.past_turns or t.open_turn is not None:
            self.scheduler.restore(t, assignment.bucket_state)

    def remove_assignment(self, assignment: Assignment) -> None:
        del self.assignments[assignment.trajectory.id]

    async def place(self, assignment: Assignment) -> None:
        request = self._build_request(assignment)
        # most turns continue there without a search of all engines
        link = self.links.get(assignment.cache_engine)
        home = link.load if link is not None else None
        if name := place_request(request, home, self._collect_loads, bool(self._queue)):
            return assignment.assign(self.links[name])
        self._arrivals += 1
        placed = assignment.enqueue((*self._compute_order(assignment), self._arrivals))
        async with self.clock.timeout(PLACE_TIMEOUT_S, "waiting for an engine for a trajectory"):
            await placed

    def enqueue(self, assignment: Assignment) -> None:
        insort(self._queue, assignment, key=lambda s: s.queue_order)

    def dequeue(self, assignment: Assignment) -> None:
        self._queue.remove(assignment)

    def can_serve(self, link: EngineLink) -> bool:
        """Return True if an engine serves its requests, and its cache can be fetched."""
        serves = link.load.version >= 0 or (link.is_closed and link.version >= 0)
        return self.links.get(link.name) is link and serves

    def find_target(self, name: str, version: int) -> EngineLink | None:
        link = self.links.get(name)
        fits = link is not None and link.load.free_slots and link.load.version >= version
        return link if fits else None

    def dispatch(self) -> None:
        """Assign queued requests to engines with room."""
        if self._closed_at_s:
            self._record_handovers()
        while self._queue and any(link.has_room for link in self.links.values()):
            first = self._queue[:LOOK_AHEAD]
            found = choose_next(
                [self._build_request(stay) for stay in first], self._collect_loads()
            )
            if found is None:
                return
            index, name = found
            first[index].assign(self.links[name])

    def _build_request(self, assignment: Assignment) -> QueuedRequest:
        return QueuedRequest(
            assignment.trajectory.version, assignment.cache_engine, self._find_bucket(assignment)
        )

    def _compute_order(self, assignment: Assignment) -> tuple[int, ...]:
        return self.scheduler.compute_order(
            assignment.trajectory.id, assignment.bucket_state.bucket
        )

    def _find_bucket(self, assignment: Assignment) -> int:
        """Return the assignment's bucket, or the nearest one with an engine, preferably longer."""
        if len(self.scheduler.buckets) == 1:
            return 0
        version = assignment.trajectory.version
        links = self._list_open_links()
        usable_buckets = {link.bucket for link in links if link.version >= version}
        return find_nearest_bucket(assignment.bucket_state.bucket, usable_buckets)

    def on_tool_return(self, assignment: Assignment) -> None:
        """Update the bucket of a trajectory after a tool return."""
        decision = self.scheduler.decide_after_tool(assignment.trajectory, assignment.bucket_state)
        if decision.outcome == "causal_signal_agree":
            home = self.links.get(assignment.cache_engine)
            if home is not None and home.bucket != self._find_bucket(assignment):
                assignment.release()
                self.dispatch()
            self._mesh.telemetry.log.info(
                "bucket",
                trajectory=assignment.trajectory.id,
                bucket=decision.bucket,
                reason=decision.reason,
            )

    def _balance(self) -> None:
        """Abort requests at engines that are better served by other engines."""
        for move in load_balancer.plan_rebalance(
            [link.total_load for link in self._list_open_links()], min_version=0
        ):
            source, target = self.links[move.source], self.links[move.target]
            for stay in source.find_movable(source.compute_share(move.count), move.waiting):
                if not stay.balance_target and target.version >= stay.trajectory.version:
                    stay.balance_target = move.target
                    source.abort_requests([stay])

    @property
    def stats(self) -> RoutingStats:
        return RoutingStats(
            continued=self.continued_trajectories,
            moved=self.rebalanced_trajectories,
            caches=dict(self.cache_actions),
            decisions=dict(self.scheduler.outcome_counts),
            buckets={link.name: link.bucket for link in self.links.values()},
            handovers=self.handovers,
            handover_s=round(self.handover_s, 4),
        )

    async def close(self) -> None:
        self._missing_engine_wait.close()
        self._seed_s = None
        tasks = list(self._link_tasks.values())
        tasks += [self._window_task] if self._window_task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
