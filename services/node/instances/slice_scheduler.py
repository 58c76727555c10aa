"""Scheduler of a gang's time slices, on rank 0's worker.

It grants slices, and has holders killed that do not release theirs. A restarted scheduler has no
state: instances request their slices again. Work that was running elsewhere in the gang, on a
worker that did not die, finishes the operation in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from meshrl.common.api.node import AcquireSlice, KillInstance, ReleaseSlice, TimeSlice, Worker
from meshrl.common.api.stats import SliceStats
from meshrl.common.base.errors import DeadlineExceeded, MeshError, StateUnavailable
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.services.node.instances.time_slices import (
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
    """Time slices of the gang whose first worker is this one; idle without such a gang."""

    def __init__(
        self, mesh: Mesh, worker: str, kill: KillInstanceProcess, limits: SliceLimits | None = None
    ) -> None:
        """Create a scheduler; `kill` ends this worker's own process of an instance, if any."""
        self._mesh, self._worker, self._kill, self._limits = mesh, worker, kill, limits
        self._gang: Gang | None = None
        self._policy = SlicePolicy(limits)
        self._pending_grants: dict[tuple[str, str, int], asyncio.Future[SliceGrant]] = {}
        self._wakeup = asyncio.Event()
        self._kill_tasks: set[asyncio.Task[None]] = set()
        self.granted_count = self.killed_count = 0

    def stats(self) -> SliceStats:
        held = [held.request.instance for held in self._policy.grants]
        return SliceStats(self.granted_count, self.killed_count, held)

    def set_gang(self, gang: Gang | None) -> None:
        """Set the gang's current record; None or another first worker: there is nothing to schedule
        here.
        """
        if gang is None or gang.workers[0] != self._worker:
            gang = None
        if gang is None or self._gang is None or gang.id != self._gang.id:
            self._policy = SlicePolicy(self._limits)
            for answer in self._pending_grants.values():
                if not answer.done():
                    answer.set_exception(self._superseded_error())
        self._gang = gang
        if gang is not None:
            now = self._mesh.clock.monotonic()
            generations = {one.id: one.generation for one in gang.instances}
            self._policy.retain_instances(generations, now + REMOVED_INSTANCE_GRACE_S)
        self._grant_waiting()

    def instance_exited(self, instance: str) -> None:
        """Release what an instance's process held: this worker's process of it has exited."""
        self._policy.instance_exited(instance)
        self._grant_waiting()

    async def acquire(self, request: AcquireSlice) -> TimeSlice:
        """Return a time slice once it is granted. A cancelled request leaves the queue.

        ServiceUnavailable: the record does not have the instance at that generation (yet).
        """
        key = (request.instance, request.incarnation, request.ticket)
        self._policy.enqueue(self._build_request(request), self._mesh.clock.monotonic())
        before = self._pending_grants.get(key)
        if before is not None and not before.done():
            before.set_exception(self._superseded_error())  # a repeated request replaces it
        answer = self._pending_grants[key] = asyncio.get_running_loop().create_future()
        self._grant_waiting()
        try:
            with contextlib.ExitStack() as said:
                if not answer.done():
                    processes = (held.request.process for held in self._policy.grants)
                    holder = next(processes, request.process)
                    said.enter_context(self._mesh.wait("its time slice", on=holder))
                held = await answer
        except asyncio.CancelledError:
            if self._pending_grants.get(key) is answer:
                self._policy.release(_ticket_of_request(request))
                self._grant_waiting()
            raise
        finally:
            if self._pending_grants.get(key) is answer:
                del self._pending_grants[key]
        return TimeSlice(request.ticket, held.deadline - self._mesh.clock.monotonic())

    def release(self, request: ReleaseSlice) -> None:
        """Release the slice and cancel all earlier requests of that process."""
        for asked in (*self._policy.waiting, *(held.request for held in self._policy.grants)):
            mine = (asked.instance, asked.incarnation) == (request.instance, request.incarnation)
            if mine and asked.sequence_number <= request.ticket:
                self._policy.release(asked.ticket)
        self._grant_waiting()

    async def run(self) -> None:
        """Enforce deadlines until cancelled."""
        clock = self._mesh.clock
        try:
            while True:
                now = clock.monotonic()
                for held in self._policy.take_overdue(now):
                    task = asyncio.create_task(
                        self._kill_holder(held), name=f"kill {held.request.instance}"
                    )
                    self._kill_tasks.add(task)
                    task.add_done_callback(self._kill_tasks.discard)
                await self._release_replaced()
                waits = clock.monotonic()
                pause_s = min(HOLDER_POLL_S, max(0.01, self._policy.next_deadline() - waits))
                self._wakeup.clear()
                with contextlib.suppress(DeadlineExceeded):
                    async with clock.timeout(pause_s, "a turn"):
                        await self._wakeup.wait()
                # The host stood still, or this worker had no processor time: a release of a holder
                # may wait unread.
                lag_s = clock.monotonic() - waits - pause_s
                if lag_s > 0.0:
                    self._policy.extend_deadlines(waits, lag_s)
        finally:
            for task in self._kill_tasks:
                task.cancel()

    def _superseded_error(self) -> ServiceUnavailable:
        return ServiceUnavailable("this request is no longer queued here", where=self._mesh.name)

    # -- grants ----------------------------------------------------------------------------------

    def _build_request(self, request: AcquireSlice) -> SliceRequest:
        residents = self._gang.instances if self._gang is not None else ()
        for one in residents:
            if (one.id, one.generation) == (request.instance, request.generation):
                return SliceRequest(
                    _ticket_of_request(request),
                    one.id,
                    one.generation,
                    request.incarnation,
                    request.ticket,
                    request.process,
                    request.operation,
                    request.estimate_s,
                    frozenset(one.ranks),
                )
        raise ServiceUnavailable(
            f"generation {request.generation} of instance {request.instance} is not on record",
            where=self._mesh.name,
            fix="Retry: the record follows soon, or the requesting process will be stopped",
        )

    def _grant_waiting(self) -> None:
        now = self._mesh.clock.monotonic()
        granted = self._policy.grant_waiting(now)
        self.granted_count += len(granted)
        if granted:
            self._wakeup.set()  # there is another deadline
        for held in self._policy.grants:
            asked = held.request
            answer = self._pending_grants.get(
                (asked.instance, asked.incarnation, asked.sequence_number)
            )
            if answer is not None and not answer.done() and self._policy.get_grant(asked.ticket):
                answer.set_result(held)

    # -- ends of holders -------------------------------------------------------------------------

    async def _release_replaced(self) -> None:
        """Release the slices of processes that another process has replaced."""
        if not self._policy.waiting:
            return
        now = self._mesh.clock.monotonic()
        for held in self._policy.grants:
            if now - held.granted_at >= HOLDER_POLL_S and await self._is_replaced(held):
                self._policy.release(held.request.ticket)
                self._grant_waiting()

    async def _is_replaced(self, grant: SliceGrant) -> bool:
        """Return whether the registry has another start of the holder's process."""
        try:
            async with self._mesh.clock.timeout(
                HOLDER_POLL_S, "looking up the holder of a time slice"
            ):
                entry = await registry.lookup(self._mesh.state, grant.request.process)
        except (StateUnavailable, DeadlineExceeded):
            return False
        return entry is not None and entry.alive and entry.incarnation != grant.request.incarnation

    async def _kill_holder(self, grant: SliceGrant) -> None:
        """Kill the processes of an instance on all its workers, then grant the next slice."""
        asked, gang = grant.request, self._gang
        if not await self._is_replaced(grant):
            lasted = self._mesh.clock.monotonic() - grant.granted_at
            why = f"it did not release its time slice for {asked.operation} after {lasted:.1f} s"
            self.killed_count += 1
            self._mesh.log.error("a time slice is overdue", resident=asked.instance, why=why)
            workers = [gang.workers[rank] for rank in sorted(asked.ranks)] if gang else []
            request = KillInstance(asked.instance, asked.generation, why)
            others = [self._kill_on_worker(w, request) for w in workers if w != self._worker]
            await run_all([self.kill_local(request), *others])
        self._policy.holder_killed(grant)
        self._grant_waiting()

    async def kill_local(self, request: KillInstance) -> None:
        """Kill this worker's own process of an instance, for the scheduler of its gang."""
        await self._kill(request.instance, request.generation, request.reason)

    async def _kill_on_worker(self, worker: str, request: KillInstance) -> None:
        """Kill an instance's process on another worker; one that does not answer is lost, with its
        processes.
        """
        try:
            await self._mesh.ref(worker_name(worker)).call(Worker.kill_instance, request)
        except MeshError as error:
            self._mesh.log.warning("ending a resident", worker=worker, error=str(error))


class SliceCallsMixin(Actor):
    """Calls of a worker's actor for its slice scheduler."""

    slice_scheduler: SliceScheduler

    @call(Worker.acquire_slice)
    async def acquire_slice(self, request: AcquireSlice) -> TimeSlice:
        return await self.slice_scheduler.acquire(request)

    @call(Worker.release_slice)
    def release_slice(self, request: ReleaseSlice) -> None:
        self.slice_scheduler.release(request)

    @call(Worker.kill_instance)
    async def kill_instance(self, request: KillInstance) -> None:
        await self.slice_scheduler.kill_local(request)


def _ticket_of_request(request: AcquireSlice) -> str:
    return f"{request.instance}/{request.incarnation}/{request.ticket}"
