"""Scheduler of a gang's time slices, on rank 0's worker.

It grants slices, and has holders killed that do not release theirs. A restarted scheduler has no
state: instances request their slices again. Work that was running elsewhere in the gang, on a
worker that did not die, finishes the operation in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from meshrl.common.api.node import (
    AcquireSlice,
    ExplainSlices,
    KillInstance,
    PrepareResidency,
    ReleaseSlice,
    ResidencyReport,
    ResidencyState,
    SliceExplanation,
    TimeSlice,
    Worker,
)
from meshrl.common.api.stats import SliceStats
from meshrl.common.base.errors import DeadlineExceeded, MeshError, StateUnavailable
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.services.node.slices.residency import Residency
from meshrl.services.node.slices.slice_queue import (
    SliceGrant,
    SliceLimits,
    SlicePolicy,
    SliceRequest,
)

KillInstanceProcess = Callable[
    [str, int, str], Awaitable[None]
]  # instance, generation, why; returns when dead
HOLDER_POLL_S = (
    2.0  # interval of checks that the holder's process is still the one that made the request
)
REMOVED_INSTANCE_GRACE_S = (
    15.0  # for the operation in progress of a removed instance, until it is killed
)


class SliceScheduler:
    """Scheduler of the time slices of the gang whose first worker is this one; otherwise idle."""

    def __init__(
        self,
        mesh: Mesh,
        worker: str,
        kill: KillInstanceProcess,
        residency: Residency,
        limits: SliceLimits | None = None,
    ) -> None:
        """Create a scheduler.

        `kill` ends this worker's own process of an instance, if any. `residency` is this worker's.
        """
        self._mesh, self._worker, self._kill, self._limits = mesh, worker, kill, limits
        self.residency = residency
        self._gang: Gang | None = None
        self._policy = SlicePolicy(limits)
        self._pending_grants: dict[tuple[str, str, int], asyncio.Future[SliceGrant]] = {}
        self._wakeup = asyncio.Event()
        self._kill_tasks: set[asyncio.Task[None]] = set()
        self.granted_count = self.killed_count = 0

    def stats(self) -> SliceStats:
        """Return the counts of granted slices and killed holders, and the instances that hold
        slices.
        """
        holders = [holders.request.instance for holders in self._policy.grants]
        return SliceStats(self.granted_count, self.killed_count, holders)

    def set_gang(self, gang: Gang | None) -> None:
        """Replace the gang's record; without a gang, or with another first worker, become idle.

        Requests of another gang fail. A removed instance keeps its slice for up to
        REMOVED_INSTANCE_GRACE_S seconds.
        """
        if gang is None or gang.workers[0] != self._worker:
            gang = None
        if gang is None or self._gang is None or gang.id != self._gang.id:
            self._policy = SlicePolicy(self._limits)
            for future in self._pending_grants.values():
                if not future.done():
                    future.set_exception(self._superseded_error())
        self._gang = gang
        if gang is not None:
            now = self._mesh.clock.monotonic()
            generations = {instance.id: instance.generation for instance in gang.instances}
            self._policy.retain_instances(generations, now + REMOVED_INSTANCE_GRACE_S)
        self._grant_waiting()

    def release_instance(self, instance: str) -> None:
        """Drop the slices and requests of an instance whose process on this worker has exited."""
        self._policy.drop_instance(instance)
        self._grant_waiting()

    async def acquire(self, request: AcquireSlice) -> TimeSlice:
        """Wait until a time slice is granted; return it with the seconds that remain of it.

        A cancelled call drops its request.

        Raises:
            ServiceUnavailable: The record does not have this generation of the instance (yet), or
                a repeated request or another gang replaced this request.
        """
        key = (request.instance, request.incarnation, request.ticket)
        self._policy.enqueue(self._build_request(request), self._mesh.clock.monotonic())
        earlier_future = self._pending_grants.get(key)
        if earlier_future is not None and not earlier_future.done():
            earlier_future.set_exception(self._superseded_error())  # a repeated request replaces it
        future = self._pending_grants[key] = asyncio.get_running_loop().create_future()
        self._grant_waiting()
        try:
            with contextlib.ExitStack() as wait_scope:
                if not future.done():
                    processes = (grant.request.process for grant in self._policy.grants)
                    holder = next(processes, request.process)
                    wait_scope.enter_context(self._mesh.wait("its time slice", on=holder))
                grant = await future
        except asyncio.CancelledError:
            if self._pending_grants.get(key) is future:
                self._policy.release(_ticket_of_request(request))
                self._grant_waiting()
            raise
        finally:
            if self._pending_grants.get(key) is future:
                del self._pending_grants[key]
        return TimeSlice(request.ticket, grant.deadline - self._mesh.clock.monotonic(), 0.0)

    def explain(self, request: ExplainSlices) -> SliceExplanation:
        """Return the recent decisions and slices of this worker's gang."""
        return SliceExplanation(self._gang.id if self._gang else "", "round_robin", [], [])

    def release(self, request: ReleaseSlice) -> None:
        """Release the slice of a request, and drop that process's earlier requests."""
        for queued in (*self._policy.waiting, *(grant.request for grant in self._policy.grants)):
            is_same_process = (queued.instance, queued.incarnation) == (
                request.instance,
                request.incarnation,
            )
            if is_same_process and queued.sequence_number <= request.ticket:
                self._policy.release(queued.ticket)
        self._grant_waiting()

    async def run(self) -> None:
        """Kill the holders of overdue slices, and free slices of replaced processes, until
        cancelled.
        """
        clock = self._mesh.clock
        try:
            while True:
                now = clock.monotonic()
                for grant in self._policy.take_overdue(now):
                    task = asyncio.create_task(
                        self._kill_holder(grant), name=f"kill {grant.request.instance}"
                    )
                    self._kill_tasks.add(task)
                    task.add_done_callback(self._kill_tasks.discard)
                await self._release_replaced()
                wait_started_at = clock.monotonic()
                pause_s = min(
                    HOLDER_POLL_S, max(0.01, self._policy.next_deadline() - wait_started_at)
                )
                self._wakeup.clear()
                with contextlib.suppress(DeadlineExceeded):
                    async with clock.timeout(pause_s, "waiting for a change of time slices"):
                        await self._wakeup.wait()
                # The host stood still, or this worker had no processor time: a release of a holder
                # may wait unread.
                lag_s = clock.monotonic() - wait_started_at - pause_s
                if lag_s > 0.0:
                    self._policy.extend_deadlines(wait_started_at, lag_s)
        finally:
            for task in self._kill_tasks:
                task.cancel()

    def _superseded_error(self) -> ServiceUnavailable:
        return ServiceUnavailable("this request is no longer queued here", where=self._mesh.name)

    # -- grants ----------------------------------------------------------------------------------

    def _build_request(self, request: AcquireSlice) -> SliceRequest:
        instances = self._gang.instances if self._gang is not None else ()
        for instance in instances:
            if (instance.id, instance.generation) == (request.instance, request.generation):
                return SliceRequest(
                    _ticket_of_request(request),
                    instance.id,
                    instance.generation,
                    request.incarnation,
                    request.ticket,
                    request.process,
                    request.function,
                    request.estimate_s,
                    frozenset(instance.ranks),
                )
        raise ServiceUnavailable(
            f"generation {request.generation} of instance {request.instance} is not on record",
            where=self._mesh.name,
            fix="Retry: the record follows soon, or the requesting process will be stopped",
        )

    def _grant_waiting(self) -> None:
        """Grant all slices that can be granted, and complete the calls that wait for them."""
        now = self._mesh.clock.monotonic()
        granted = self._policy.grant_waiting(now)
        self.granted_count += len(granted)
        if granted:
            self._wakeup.set()  # there is another deadline
        for grant in self._policy.grants:
            request = grant.request
            future = self._pending_grants.get(
                (request.instance, request.incarnation, request.sequence_number)
            )
            if future is not None and not future.done() and self._policy.get_grant(request.ticket):
                future.set_result(grant)

    # -- ends of holders -------------------------------------------------------------------------

    async def _release_replaced(self) -> None:
        """Release the slices of processes that another process has replaced."""
        if not self._policy.waiting:
            return
        now = self._mesh.clock.monotonic()
        for grant in self._policy.grants:
            if now - grant.granted_at >= HOLDER_POLL_S and await self._is_replaced(grant):
                self._policy.release(grant.request.ticket)
                self._grant_waiting()

    async def _is_replaced(self, grant: SliceGrant) -> bool:
        """Return True if a newer incarnation holds the registry name of the holder's process.

        Return False if Redis does not answer within HOLDER_POLL_S.
        """
        try:
            async with self._mesh.clock.timeout(
                HOLDER_POLL_S, "looking up the holder of a time slice"
            ):
                entry = await registry.lookup(self._mesh.state, grant.request.process)
        except (StateUnavailable, DeadlineExceeded):
            return False
        return entry is not None and entry.alive and entry.incarnation != grant.request.incarnation

    async def _kill_holder(self, grant: SliceGrant) -> None:
        """Kill an overdue instance's processes on all its workers, then grant the next slices."""
        slice_request, gang = grant.request, self._gang
        if not await self._is_replaced(grant):
            held_s = self._mesh.clock.monotonic() - grant.granted_at
            why = (
                f"it did not release its time slice for {slice_request.function} after "
                f"{held_s:.1f} s"
            )
            self.killed_count += 1
            self._mesh.log.error(
                "a time slice is overdue", resident=slice_request.instance, why=why
            )
            workers = [gang.workers[rank] for rank in sorted(slice_request.ranks)] if gang else []
            request = KillInstance(slice_request.instance, slice_request.generation, why)
            others = [self._kill_on_worker(w, request) for w in workers if w != self._worker]
            await run_all([self.kill_local(request), *others])
        self._policy.free_killed(grant)
        self._grant_waiting()

    async def kill_local(self, request: KillInstance) -> None:
        """Kill this worker's own process of an instance, for the scheduler of its gang."""
        await self._kill(request.instance, request.generation, request.reason)

    async def _kill_on_worker(self, worker: str, request: KillInstance) -> None:
        """Kill an instance's process on another worker; log an error.

        A worker that does not answer is considered lost, with its processes.
        """
        try:
            await self._mesh.ref(worker_name(worker)).call(Worker.kill_instance, request)
        except MeshError as error:
            self._mesh.log.warning(
                "an instance could not be killed", worker=worker, error=str(error)
            )


class SliceCallsMixin(Actor):
    """Calls of a worker's actor for its slice scheduler."""

    slice_scheduler: SliceScheduler

    @call(Worker.acquire_slice)
    async def acquire_slice(self, request: AcquireSlice) -> TimeSlice:
        return await self.slice_scheduler.acquire(request)

    @call(Worker.release_slice)
    def release_slice(self, request: ReleaseSlice) -> None:
        self.slice_scheduler.release(request)

    @call(Worker.prepare_residency)
    async def prepare_residency(self, order: PrepareResidency) -> ResidencyReport:
        return await self.slice_scheduler.residency.prepare(order)

    @call(Worker.read_residency)
    def read_residency(self, _: None) -> ResidencyState:
        return self.slice_scheduler.residency.state()

    @call(Worker.explain_slices)
    def explain_slices(self, request: ExplainSlices) -> SliceExplanation:
        return self.slice_scheduler.explain(request)

    @call(Worker.kill_instance)
    async def kill_instance(self, request: KillInstance) -> None:
        await self.slice_scheduler.kill_local(request)


def _ticket_of_request(request: AcquireSlice) -> str:
    return f"{request.instance}/{request.incarnation}/{request.ticket}"
