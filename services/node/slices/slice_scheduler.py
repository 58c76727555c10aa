"""Scheduler of a gang's time slices, on rank 0's worker.

It has the tensors of the next instance moved, grants slices, and has holders killed that do not
release theirs. A restarted scheduler has no state: instances request their slices again. Work that
was running elsewhere in the gang, on a worker that did not die, finishes the operation in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from meshrl.common.api.node import (
    AcquireSlice,
    ExplainSlices,
    KillInstance,
    ReleaseSlice,
    ResidencyReport,
    SliceExplanation,
    TimeSlice,
    Worker,
)
from meshrl.common.api.stats import SliceStats
from meshrl.common.base.errors import DeadlineExceeded, MeshError, PeerLost, StateUnavailable
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.services.node.slices.gang_residency import GangResidency
from meshrl.services.node.slices.policies import DEFAULT_POLICY, POLICIES
from meshrl.services.node.slices.residency import Residency
from meshrl.services.node.slices.slice_history import SliceHistory, describe_candidates
from meshrl.services.node.slices.slice_policy import SliceRequest
from meshrl.services.node.slices.slice_queue import (
    ChosenRequest,
    SliceGrant,
    SliceLimits,
    SliceQueue,
)

# instance, generation, why; returns when dead
KillInstanceProcess = Callable[[str, int, str], Awaitable[None]]
HOLDER_POLL_S = 2.0  # between checks that the holder's process is the one that made the request
REMOVED_INSTANCE_GRACE_S = 15.0  # for the operation in progress of a removed instance
FAILURE_PAUSE_S = 1.0  # between two preparations for an instance, if they fail


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
        self._policy = POLICIES[DEFAULT_POLICY]
        self._residency = GangResidency(mesh, worker, residency)
        self._history = SliceHistory(mesh.clock)
        self._queue = self._make_queue()
        self._pending_grants: dict[tuple[str, str, int], asyncio.Future[SliceGrant]] = {}
        self._preparations: dict[str, asyncio.Task[None]] = {}  # by ticket
        self._wakeup = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # kills and failures
        # by ticket: workers whose process is alive, with the error of its last kill
        self._being_killed: dict[str, dict[str, str]] = {}
        self.granted_count = self.killed_count = 0

    def stats(self) -> SliceStats:
        """Return the counts of granted slices and killed holders, and the instances that hold
        slices.
        """
        holders = [holders.request.instance for holders in self._queue.grants]
        moved = self._history.loaded_bytes, self._history.hidden_bytes
        switch_s = round(self._history.switch_s, 3)
        return SliceStats(self.granted_count, self.killed_count, holders, switch_s, *moved)

    def set_policy(self, name: str) -> None:
        """Order requests by another policy from now on; see `pool.slice_policy`."""
        self._queue.policy = self._policy = POLICIES[name]
        self._grant_waiting()

    def set_gang(self, gang: Gang | None) -> None:
        """Replace the gang's record; without a gang, or with another first worker, become idle.

        Requests of another gang fail. A removed instance keeps its slice for up to
        REMOVED_INSTANCE_GRACE_S seconds.
        """
        if gang is None or gang.workers[0] != self._worker:
            gang = None
        if gang is None or self._gang is None or gang.id != self._gang.id:
            self._history = SliceHistory(self._mesh.clock)
            self._queue = self._make_queue()
            for future in self._pending_grants.values():
                if not future.done():
                    future.set_exception(self._superseded_error())
        self._gang = gang
        self._residency.set_gang(gang)
        if gang is not None:
            now = self._mesh.clock.monotonic()
            generations = {instance.id: instance.generation for instance in gang.instances}
            self._queue.retain_instances(generations, now + REMOVED_INSTANCE_GRACE_S)
        self._grant_waiting()

    def release_instance(self, instance: str) -> None:
        """Drop the slices and requests of an instance whose process on this worker has exited.

        A slice on several ranks ends when the processes of the others are dead: they may still
        compute, and without this one their work is lost.
        """
        workers = self._gang.workers if self._gang is not None else ()
        for request in self._queue.list_requests(instance):
            if alive := self._being_killed.get(request.ticket):  # its next process stays
                alive.pop(workers[min(request.ranks)], None)
        for grant in self._queue.drop_instance(instance, [worker_name(one) for one in workers]):
            why = "the process of their first rank has exited within their time slice"
            self._run(self._kill_other_ranks(grant, why), f"kill {instance}")
        for (owner, incarnation, number), future in self._pending_grants.items():
            is_queued = self._queue.has(_format_ticket(owner, incarnation, number))
            if owner == instance and not is_queued and not future.done():
                future.set_exception(self._superseded_error())
        self._grant_waiting("lost")

    async def acquire(self, request: AcquireSlice) -> TimeSlice:
        """Wait until a time slice is granted; return it with the seconds that remain of it.

        A cancelled call drops its request.

        Raises:
            ServiceUnavailable: The record does not have this generation of the instance (yet), a
                repeated request or another gang replaced this request, or its tensors could not be
                moved.
            StorageFull: There is no room for its tensors, or for those that must leave.
        """
        clock = self._mesh.clock
        key = (request.instance, request.incarnation, request.ticket)
        slice_request = self._build_request(request)
        if request.starts_process:  # only exits on this worker are reported to its scheduler
            self.release_instance(request.instance)
        self._queue.enqueue(slice_request, clock.monotonic())
        earlier_future = self._pending_grants.get(key)
        if earlier_future is not None and not earlier_future.done():
            earlier_future.set_exception(self._superseded_error())  # a repeated request replaces it
        future = self._pending_grants[key] = asyncio.get_running_loop().create_future()
        self._grant_waiting("lost")
        try:
            with contextlib.ExitStack() as wait_scope:
                if not future.done():
                    processes = (grant.request.process for grant in self._queue.grants)
                    # without a holder this worker prepares a slice
                    holder = next(processes, self._mesh.name)
                    wait_scope.enter_context(self._mesh.wait("its time slice", on=holder))
                grant = await future
        except asyncio.CancelledError:
            if self._pending_grants.get(key) is future:
                self._queue.release(slice_request.ticket, clock.monotonic())
                self._grant_waiting()
            raise
        finally:
            if self._pending_grants.get(key) is future:
                del self._pending_grants[key]
        now = clock.monotonic()
        quantum_s = self._queue.compute_quantum_s(slice_request, now)
        switch_s = grant.granted_at - grant.chosen_at
        wait = self._history.describe_wait(slice_request.ticket)
        return TimeSlice(request.ticket, grant.deadline - now, quantum_s, switch_s, *wait)

    def explain(self, request: ExplainSlices) -> SliceExplanation:
        """Return the recent decisions and slices of this worker's gang, and what waits."""
        now = self._mesh.clock.monotonic()
        return SliceExplanation(
            self._gang.id if self._gang else "",
            self._policy.name,
            self._history.list_decisions(request.since_s),
            self._history.list_slices(request.since_s),
            describe_candidates(self._queue.rank_waiting(now), now),
            [why for alive in self._being_killed.values() for why in alive.values() if why],
        )

    def release(self, request: ReleaseSlice) -> None:
        """Release the slice of a request, and drop that process's earlier requests."""
        now = self._mesh.clock.monotonic()
        for queued in self._queue.list_requests(request.instance):
            is_same_process = queued.incarnation == request.incarnation
            if is_same_process and queued.sequence_number <= request.ticket:
                self._queue.release(queued.ticket, now)
        self._grant_waiting()

    async def run(self) -> None:
        """Kill the holders of overdue slices, and free slices of replaced processes, until
        cancelled.
        """
        clock = self._mesh.clock
        try:
            while True:
                now = clock.monotonic()
                for grant in self._queue.take_overdue(now):
                    self._run(self._kill_holder(grant), f"kill {grant.request.instance}")
                await self._release_replaced()
                wait_started_at = clock.monotonic()
                next_event = min(self._queue.next_deadline(), self._queue.anticipates_until)
                pause_s = min(HOLDER_POLL_S, max(0.001, next_event - wait_started_at))
                self._wakeup.clear()
                with contextlib.suppress(DeadlineExceeded):
                    async with clock.timeout(pause_s, "waiting for a change of time slices"):
                        await self._wakeup.wait()
                # The host stood still, or this worker had no processor time: a release of a holder
                # may wait unread.
                lag_s = clock.monotonic() - wait_started_at - pause_s
                if lag_s > 0.0:
                    self._queue.extend_deadlines(wait_started_at, lag_s)
                if self._queue.anticipates_until <= clock.monotonic():
                    self._grant_waiting()
        finally:
            preparations, self._preparations = self._preparations, {}
            for task in (*self._tasks, *preparations.values()):
                task.cancel()
            await self._residency.close()

    def _make_queue(self) -> SliceQueue:
        return SliceQueue(
            self._policy,
            self._limits,
            self._residency.estimate_switch_s,
            self._history.add_decision,
        )

    def _superseded_error(self) -> ServiceUnavailable:
        return ServiceUnavailable("this request is no longer queued here", where=self._mesh.name)

    # -- grants ----------------------------------------------------------------------------------

    def _build_request(self, request: AcquireSlice) -> SliceRequest:
        instances = self._gang.instances if self._gang is not None else ()
        for instance in instances:
            if (instance.id, instance.generation) == (request.instance, request.generation):
                return SliceRequest(
                    _format_ticket(request.instance, request.incarnation, request.ticket),
                    instance.id,
                    instance.generation,
                    request.incarnation,
                    request.ticket,
                    request.process,
                    request.function,
                    request.estimate_s,
                    frozenset(instance.ranks),
                    tuple(request.kinds),
                    request.is_first,
                    request.repeat_gap_s,
                )
        raise ServiceUnavailable(
            f"generation {request.generation} of instance {request.instance} is not on record",
            where=self._mesh.name,
            fix="Retry: the record follows soon, or the requesting process will be stopped",
        )

    def _grant_waiting(self, end: str = "released") -> None:
        """Grant or prepare all slices that can be, after a change of the queue.

        `end` is the reason if the change has ended slices.
        """
        tickets = [grant.request.ticket for grant in self._queue.grants]
        self._history.end_others(tickets, end)
        chosen_tickets = {chosen.request.ticket for chosen in self._queue.chosen}
        for ticket in self._preparations.keys() - chosen_tickets:
            self._preparations.pop(ticket).cancel()
        for chosen in self._queue.choose_waiting(self._mesh.clock.monotonic()):
            request = chosen.request
            # A process that loads may start on a worker whose residency is not known yet.
            if request.function != "load" and self._residency.needs_no_order(request.ranks):
                self._begin(request, [])
            else:
                self._preparations[request.ticket] = asyncio.create_task(
                    self._prepare(request), name=f"preparation of {request.instance}"
                )
        if not math.isinf(self._queue.anticipates_until):
            self._wakeup.set()
        for grant in self._queue.grants:
            self._complete(grant)
            self._prefetch_beside(grant.request)
        if not (self._queue.grants or self._queue.chosen or self._queue.waiting):
            self._prefetch_beside(None)

    def _begin(self, request: SliceRequest, reports: Sequence[ResidencyReport]) -> None:
        """Begin the slice of a chosen request, whose tensors are in place."""
        grant = self._queue.begin(request.ticket, self._mesh.clock.monotonic())
        self.granted_count += 1
        instances = self._gang.instances if self._gang is not None else ()
        job = next((one.job for one in instances if one.id == request.instance), "")
        self._history.begin(grant, job, reports)
        self._wakeup.set()  # there is another deadline

    def _complete(self, grant: SliceGrant) -> None:
        """Complete the call that waits for a slice, if any."""
        request = grant.request
        future = self._pending_grants.get(_key_of(request))
        if future is not None and not future.done() and self._queue.get_grant(request.ticket):
            future.set_result(grant)

    # -- moves of tensors ------------------------------------------------------------------------

    async def _prepare(self, request: SliceRequest) -> None:
        """Move the tensors for a chosen request, then begin its slice, or fail the request.

        It is cancelled when the request is dropped.
        """
        expected = self._queue.forecast_uses(self._mesh.clock.monotonic())
        try:
            computing = self._queue.list_computing()
            reports = await self._residency.prepare(request, computing, expected)
        except MeshError as error:
            self._fail_preparation(request, error)
        except BaseException as error:
            # `_grant_waiting` removes a preparation before it cancels it
            if self._preparations.get(request.ticket) is asyncio.current_task():
                why = f"the moves of tensors ended with {error!r}"
                self._fail_preparation(request, ServiceUnavailable(why, where=self._mesh.name))
                self._grant_waiting()
            raise
        else:
            self._preparations.pop(request.ticket, None)
            self._begin(request, reports)
        self._grant_waiting()

    def _fail_preparation(self, request: SliceRequest, error: MeshError) -> None:
        """Drop a chosen request, and fail the call that waits for it."""
        self._preparations.pop(request.ticket, None)
        self._queue.release(request.ticket, self._mesh.clock.monotonic())
        self._mesh.log.warning(
            "a time slice cannot begin", resident=request.instance, why=str(error)
        )
        self._run(self._fail_request(request, error), f"failure of {request.instance}")

    async def _fail_request(self, request: SliceRequest, error: MeshError) -> None:
        """Fail the call of a dropped request after a pause, since it is repeated at once."""
        future = self._pending_grants.get(_key_of(request))
        await self._mesh.clock.sleep(FAILURE_PAUSE_S)
        if future is not None and not future.done():
            future.set_exception(error)

    def _prefetch_beside(self, holder: SliceRequest | None) -> None:
        """Prefetch the tensors of the instance that probably follows a holder, if any."""
        if holder is not None and self._residency.is_resident(holder.ranks):
            return
        now = self._mesh.clock.monotonic()
        following = self._queue.predict_next(holder, now)
        if following is not None:
            computing, expected = self._queue.list_computing(), self._queue.forecast_uses(now)
            self._residency.start_prefetch(following, holder, computing, expected)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- ends of holders -------------------------------------------------------------------------

    async def _release_replaced(self) -> None:
        """Release the slices of processes that another process has replaced."""
        if not self._queue.waiting:
            return
        now = self._mesh.clock.monotonic()
        occupants: list[ChosenRequest | SliceGrant] = [*self._queue.chosen, *self._queue.grants]
        for occupant in occupants:
            request = occupant.request
            is_due = now - occupant.chosen_at >= HOLDER_POLL_S
            if is_due and await self._is_replaced(request):
                self._queue.release(request.ticket, self._mesh.clock.monotonic())
                self._grant_waiting("lost")

    async def _is_replaced(self, request: SliceRequest) -> bool:
        """Return True if a newer incarnation holds the registry name of the holder's process.

        Return False if Redis does not answer within HOLDER_POLL_S.
        """
        try:
            async with self._mesh.clock.timeout(
                HOLDER_POLL_S, "looking up the holder of a time slice"
            ):
                entry = await registry.lookup(self._mesh.state, request.process)
        except (StateUnavailable, DeadlineExceeded):
            return False
        return entry is not None and entry.alive and entry.incarnation != request.incarnation

    async def _kill_holder(self, grant: SliceGrant) -> None:
        """Kill an overdue instance's processes on all its workers, then grant the next slices."""
        slice_request = grant.request
        if not await self._is_replaced(slice_request):
            held_s = self._mesh.clock.monotonic() - grant.granted_at
            why = (
                f"it did not release its time slice for {slice_request.function} after "
                f"{held_s:.1f} s"
            )
            self.killed_count += 1
            self._history.overdue.add(slice_request.ticket)
            self._mesh.log.error(
                "a time slice is overdue", resident=slice_request.instance, why=why
            )
            await self._kill_ranks(slice_request, sorted(slice_request.ranks), why)
        self._queue.free_killed(grant)
        self._grant_waiting("lost")

    async def _kill_other_ranks(self, grant: SliceGrant, why: str) -> None:
        """Kill the processes of an instance's further ranks, then free its slice."""
        await self._kill_ranks(grant.request, sorted(grant.request.ranks)[1:], why)
        self._queue.free_killed(grant)
        self._grant_waiting("lost")

    async def _kill_ranks(self, request: SliceRequest, ranks: Sequence[int], why: str) -> None:
        """Kill a holder's processes of these ranks until none is left, or its slice is dropped.

        The holder keeps its slice, because a process that survives keeps its memory.
        """
        workers = self._gang.workers if self._gang is not None else ()
        alive = self._being_killed[request.ticket] = {workers[r]: "" for r in ranks if workers}
        order = KillInstance(request.instance, request.generation, why)
        while alive and self._queue.has(request.ticket):
            await run_all(self._kill_on_worker(worker, order, alive) for worker in sorted(alive))
            if alive:
                await self._mesh.clock.sleep(HOLDER_POLL_S)
        del self._being_killed[request.ticket]

    async def kill_local(self, request: KillInstance) -> None:
        """Kill this worker's own process of an instance, for the scheduler of its gang."""
        await self._kill(request.instance, request.generation, request.reason)

    async def _kill_on_worker(
        self, worker: str, order: KillInstance, alive: dict[str, str]
    ) -> None:
        """Kill an instance's process on a worker and remove it from `alive`, or set its error.

        A lost worker ends with its processes.
        """
        try:
            if worker == self._worker:
                await self.kill_local(order)
            else:
                await self._mesh.ref(worker_name(worker)).call(Worker.kill_instance, order)
        except MeshError as error:
            self._mesh.log.warning(
                "an instance could not be killed", worker=worker, error=str(error)
            )
            if not isinstance(error, PeerLost):
                if worker in alive:
                    alive[worker] = f"{order.instance} on {worker} was not killed: {error}"
                return
        alive.pop(worker, None)


def _key_of(request: SliceRequest) -> tuple[str, str, int]:
    return request.instance, request.incarnation, request.sequence_number


def _format_ticket(instance: str, incarnation: str, number: int) -> str:
    return f"{instance}/{incarnation}/{number}"
