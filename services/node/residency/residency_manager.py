"""Residency manager of a worker: moves tensor kinds so that a time slice finds what it needs.

A slice scheduler orders it before a grant; the moves themselves are the role processes'. Nothing
here needs Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from meshrl.common.api.node import (
    PREPARE_TIMEOUT_S,
    KindMove,
    KindUse,
    PrepareResidency,
    ResidencyReport,
    ResidencyState,
)
from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost, StorageFull
from meshrl.common.hardware.gpus.nvml import DRIVER_ERRORS
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull, GpuMemoryGuard
from meshrl.services.node.residency.accelerator_state import AcceleratorState
from meshrl.services.node.residency.background_moves import BackgroundMoves, is_of
from meshrl.services.node.residency.kind_moves import KindMover, MoveResults
from meshrl.services.node.residency.kind_table import KindTable, LocalProcess
from meshrl.services.node.residency.residency_plan import (
    PlannedMove,
    ResidencySnapshot,
    plan_order,
    plan_room,
)
from meshrl.services.node.residency.start_rooms import StartRooms

MAX_PLANS = 8  # of one order: each further one follows the failure of a process or tier
MAX_REPORTS = 3  # requests to a process whose state changes between them
LOST_POLL_S = 1.0  # until the exit of a lost process is noticed
ROOM_POLL_S = 0.2  # while a process that starts, wakes or leaves has the room

MakePlan = Callable[[ResidencySnapshot], list[PlannedMove]]
KillInstanceProcess = Callable[[str, int, str], Awaitable[None]]


@dataclass
class _Order:
    """Order in progress, with all callers that wait for it."""

    request: PrepareResidency
    results: MoveResults = field(default_factory=MoveResults)
    task: asyncio.Task[ResidencyReport] | None = None
    waiter_count: int = 0
    is_preempted: bool = False  # a prefetch that an order or another prefetch follows


class ResidencyManager:
    """Residency of the worker's instances.

    It implements `meshrl.services.node.slices.residency`.

    async with ResidencyManager(mesh, budgets, gpu_memory, list_processes, kill) as residency:
        report = await residency.prepare(order)
    """

    def __init__(
        self,
        mesh: Mesh,
        budgets: Budgets,
        gpu_memory: GpuMemoryGuard,
        list_processes: Callable[[], Sequence[LocalProcess]],
        kill: KillInstanceProcess,
    ) -> None:
        """Create a manager; see `KindMover` for `kill`."""
        self._mesh, self._budgets, self._gpu_memory = mesh, budgets, gpu_memory
        self._table = KindTable(mesh, budgets, list_processes)
        self._mover = KindMover(mesh, self._table, lambda: self._accelerator.free_bytes, kill)
        rates = self._mover.rates
        self._accelerator = AcceleratorState(budgets, gpu_memory, self._table, rates)
        self._lock = asyncio.Lock()  # of the accelerator: one plan at a time
        self._orders: dict[tuple[str, bool], _Order] = {}  # by ticket and prefetch
        self._background = BackgroundMoves(self._lock, self._table, self._mover, self._accelerator)
        self._rooms = StartRooms(mesh, self)

    async def __aenter__(self) -> Self:
        try:
            self._accelerator.device_bytes = await self._gpu_memory.read_total_bytes()
        except (DeadlineExceeded, *DRIVER_ERRORS) as error:
            self._mesh.log.warning("the accelerator's memory is unknown", error=str(error))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._mover.is_closing = True
        await self._rooms.close()
        tasks = [order.task for order in self._orders.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        await _cancel(*tasks)

    # -- the scheduler's calls -------------------------------------------------------------------

    async def prepare(self, order: PrepareResidency) -> ResidencyReport:
        """Bring kinds of an instance onto the accelerator, and others off it to make room.

        A repeated order waits for the one in progress. An order whose callers are all cancelled
        ends between two chunks.

        Raises:
            GpuMemoryFull: The kinds do not fit, whatever leaves.
            StorageFull: There is no room for the kinds that must leave.
            NotFound: No process of this generation of the instance runs here.
            MeshError: The instance's process has failed to load its kinds.
        """
        if not self.is_limited or (not order.prefetch and self._is_resident(order)):
            return self._complete(order, [])
        key = order.ticket, order.prefetch
        current = self._find_order(key)
        while current is not None and current.task is not None and current.task.cancelling():
            await asyncio.wait([current.task])  # it ends at the next chunk; then the order is new
            current = self._find_order(key)
        if current is None:
            for other in self._orders.values():
                other.is_preempted |= order.prefetch and other.request.prefetch
            current = self._orders[key] = _Order(order)
            current.task = asyncio.create_task(self._run(current), name=f"prepare {order.instance}")
            current.task.add_done_callback(partial(self._end_order, current))
        assert current.task is not None
        current.waiter_count += 1
        try:
            return await asyncio.shield(current.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if current.is_preempted and caller is not None and not caller.cancelling():
                return ResidencyReport(False, [], 0)  # before it began
            if current.waiter_count == 1:
                await _cancel(current.task)
            raise
        finally:
            current.waiter_count -= 1

    def state(self) -> ResidencyState:
        """Return where the kinds are now, and the measured rates of moves.

        An instance that waits for room, or whose kinds are unknown, has nothing on the accelerator:
        its scheduler then orders the kinds of each instance before it computes.
        """
        return self._accelerator.describe(self._rooms.is_pending)

    @property
    def copy_rates(self) -> dict[str, float]:
        """Measured bytes per second of moves, by `source>target` of tiers."""
        return self._mover.rates.by_direction

    def release_instance(self, instance: str) -> None:
        """End the calls of an instance whose process has exited."""
        self._table.calls.end(instance)

    # -- rooms of processes that start -----------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """True if the accelerator's bytes are counted."""
        return bool(self._accelerator.budget)

    def reserve(self, desired: DesiredRole, needed: SliceBytes) -> bool:
        """Reserve room for a process; see `AcceleratorRoom`."""
        self._accelerator.needed[desired.instance.id] = needed
        size_bytes = needed.largest
        if not self.is_limited:
            return True
        if self._rooms.is_pending(desired.name):
            if not (desired.rank_index and self._budgets.has_reservation(desired.name)):
                return self._rooms.request(desired, size_bytes)
            self._rooms.cancel(desired.name)  # the first rank's time slice has made its room
        if self._budgets.has_reservation(desired.name):
            return True
        if self._accelerator.has_room(size_bytes) and not self._lock.locked():
            self._claim(desired, size_bytes)
            return True
        return self._rooms.request(desired, size_bytes)

    def extend_reservation(self, name: str) -> None:
        """Extend the reservation of a process; see `AcceleratorRoom`."""
        self._rooms.extend(name)

    def cancel_reservation(self, name: str) -> None:
        """Cancel the reservation of a process; see `AcceleratorRoom`."""
        self._rooms.cancel(name)
        if self._budgets.has_reservation(name):
            self._budgets.cancel_claim(name)

    async def claim_free_room(self, desired: DesiredRole, size_bytes: int) -> bool:
        """Claim free room for a process; see `RoomMaker`."""
        async with self._lock:
            if self._accelerator.has_room(size_bytes):
                self._claim(desired, size_bytes)
            elif not self._budgets.has_reservation(desired.name):
                holder = self._background.holder  # it may compute
                await self._table.refresh({holder.instance} if holder is not None else ())
                plan_room(self._accelerator.make_snapshot(), desired.instance.id, size_bytes)
                return False
        return True

    def has_process(self, desired: DesiredRole) -> bool:
        """Return True if the process runs; see `RoomMaker`."""
        instance = desired.instance
        process = self._table.find_process(instance.id, instance.generation)
        return process is not None and bool(process.pid)

    async def make_room(self, desired: DesiredRole, size_bytes: int) -> None:
        """Move kinds of other instances away; see `RoomMaker`."""
        async with self._lock:
            await self._make_room(desired, size_bytes, (), (), MoveResults())

    async def _make_room(
        self,
        desired: DesiredRole,
        size_bytes: int,
        computing: Sequence[KindUse],
        expected: Sequence[KindUse],
        results: MoveResults,
    ) -> None:
        """Make and claim room, unless an order has done so."""
        if self._budgets.has_reservation(desired.name):
            return
        instance = desired.instance.id
        await self._execute(
            lambda snapshot: plan_room(snapshot, instance, size_bytes), computing, expected, results
        )
        self._claim(desired, size_bytes)

    def _claim(self, desired: DesiredRole, size_bytes: int) -> None:
        self._budgets.reserve(desired.name, size_bytes)
        self._rooms.note_claim(desired.name)

    # -- orders ----------------------------------------------------------------------------------

    def _find_order(self, key: tuple[str, bool]) -> _Order | None:
        order = self._orders.get(key)
        return None if order is None or order.task is None or order.task.done() else order

    def _end_order(self, order: _Order, task: asyncio.Task[ResidencyReport]) -> None:
        """Remove an order that was cancelled before it began."""
        consume_exception(task)
        key = order.request.ticket, order.request.prefetch
        if self._orders.get(key) is order:
            del self._orders[key]

    async def _run(self, order: _Order) -> ResidencyReport:
        request = order.request
        try:
            async with self._mesh.clock.timeout(PREPARE_TIMEOUT_S, f"moves for {request.instance}"):
                if request.prefetch:
                    return await self._prefetch(order)
                await self._stop_background(request)
                async with self._lock:
                    await self._bring(request, order.results)
            return self._complete(request, order.results.moves)
        except asyncio.CancelledError:
            if order.is_preempted:
                return ResidencyReport(False, order.results.moves, 0)
            raise
        finally:
            del self._orders[request.ticket, request.prefetch]

    async def _bring(self, request: PrepareResidency, results: MoveResults) -> None:
        """Bring the requested kinds onto the accelerator, or make room for a process's start."""
        instance = request.instance
        computing = [use for use in request.computing if use.instance != instance]
        room = await self._rooms.find(instance, lambda: self._has_process(request))
        if room is not None:
            await self._make_room(*room, computing, request.expected, results)
            return
        if not self._has_process(request):
            raise NotFound(
                f"no process of generation {request.generation} of {instance} runs here",
                where=self._mesh.name,
            )
        await self._execute(
            lambda snapshot: plan_order(snapshot, instance, request.kinds),
            computing,
            request.expected,
            results,
            KindUse(instance, request.kinds),
        )

    def _has_process(self, request: PrepareResidency) -> bool:
        process = self._table.find_process(request.instance, request.generation)
        if process is None:
            return False
        # one that another worker runs on this worker's accelerator has no pid here
        is_elsewhere = not process.is_time_sliced
        return bool(process.pid) or is_elsewhere or self._budgets.has_reservation(process.name)

    async def _execute(
        self,
        make_plan: MakePlan,
        computing: Sequence[KindUse],
        expected: Sequence[KindUse],
        results: MoveResults,
        requester: KindUse | None = None,
    ) -> None:
        """Plan and move until nothing is left to do; a move that does not happen leads to another
        plan.

        Raises the errors of the plan, and of the requester's own process.
        """
        full_tiers: set[str] = set()
        staying: set[str] = set()
        names = frozenset(use.instance for use in computing)

        def make_snapshot() -> ResidencySnapshot:
            return self._accelerator.make_snapshot(
                computing, expected, staying=staying, full_tiers=full_tiers, requester=requester
            )

        for _ in range(MAX_PLANS):
            name = requester.instance if requester else ""
            await self._table.refresh(names | staying, name)
            planned = await self._wait_for_plan(make_plan, make_snapshot, names | staying, name)
            if not planned:
                return
            count, moved_count = len(results.failures), len(results.moves) + len(planned)
            await self._mover.run(planned, results, names)
            if len(results.moves) == moved_count:
                return
            for move, error in results.failures[count:]:
                if (entry := self._table.find(move.instance)) is not None:
                    entry.is_stale = True  # its process has not exited
                if isinstance(error, StorageFull) and move.tier:
                    full_tiers.add(move.tier)
                elif requester is not None and move.instance == requester.instance:
                    raise error
                elif isinstance(error, PeerLost | NotFound):
                    await self._mesh.clock.sleep(LOST_POLL_S)  # until its supervisor has noticed
                elif not isinstance(error, DeadlineExceeded):
                    self._mesh.log.warning("kinds stay", instance=move.instance, error=str(error))
                    staying.add(move.instance)
        why = f"with {results.failures[-1][1]}" if results.failures else "for lack of room"
        raise DeadlineExceeded(
            f"{MAX_PLANS} plans of moves have failed, the last one {why}", where=self._mesh.name
        )

    async def _wait_for_plan(
        self,
        make_plan: MakePlan,
        make_snapshot: Callable[[], ResidencySnapshot],
        computing: Collection[str],
        requester: str,
    ) -> list[PlannedMove]:
        """Plan; wait for room while processes that start, wake or leave have it."""
        was_expected = False
        while True:
            await self._require_report(requester, computing)
            try:
                return make_plan(make_snapshot())
            except GpuMemoryFull:
                is_expected = self._is_room_expected()
                if not is_expected and not was_expected:
                    raise
            was_expected = is_expected
            await self._mesh.clock.sleep(ROOM_POLL_S)
            # One that waits for a time slice of its own can give its room back.
            await self._table.refresh(computing, calls_starting=True)

    async def _require_report(self, requester: str, computing: Collection[str]) -> None:
        """Read the kinds of a requester again if its process has changed since they were read.

        Without a report nothing would be loaded. Raises PeerLost if the process does not answer.
        """
        for _ in range(MAX_REPORTS):
            running = [one for one in self._table.processes if one.pid]
            if (
                not any(one.process_key[0] == requester for one in running)
                or self._table.find(requester) is not None
            ):
                return
            await self._table.refresh(computing, requester)
        raise PeerLost(f"{requester} does not report its kinds", where=self._mesh.name)

    def _is_room_expected(self) -> bool:
        """Return True if room is about to appear; claims that are too old end."""
        for process in self._table.processes:
            has_exited = not process.pid and not self._budgets.has_reservation(process.name)
            is_counted = self._budgets.get_usage(process.name).accelerator > 0
            if (process.pid and process.is_moving) or (has_exited and is_counted):
                return True
        claims = self._rooms.end_claims(self._budgets.has_reservation)
        for name, is_overdue in claims.items():
            # One that reports its kinds computes in time slices, each of which brings it its room.
            if is_overdue or any(entry.name == name for entry in self._table.entries):
                self._budgets.cancel_claim(name)
        return bool(claims)

    def _is_resident(self, order: PrepareResidency) -> bool:
        """Return True if nothing has to move, and no move in progress touches the instance."""
        has_orders = any(not one.request.prefetch for one in self._orders.values())
        active = self._mover.active
        if has_orders or any(is_of(move, order) for move in active):
            return False
        entry = self._table.find(order.instance)
        if entry is None or entry.generation != order.generation:
            return False
        is_missing = any(
            place.missing_bytes
            for place in entry.places.values()
            if not order.kinds or place.kind in order.kinds
        )
        working_bytes = self._accelerator.compute_working_bytes(
            KindUse(order.instance, order.kinds)
        )
        loading_bytes = sum(move.size_bytes for move in active if move.action == "load")
        return not is_missing and self._accelerator.has_room(working_bytes + loading_bytes)

    def _complete(self, request: PrepareResidency, moves: list[KindMove]) -> ResidencyReport:
        """Return the report of an order whose kinds are on the accelerator: it computes now."""
        entry = self._table.find(request.instance)
        prefetched_bytes = 0
        if not request.prefetch:
            self._background.holder = KindUse(request.instance, request.kinds)
            if entry is not None:
                entry.is_stale = True
                kinds = [
                    k for k in entry.prefetched_bytes if not request.kinds or k in request.kinds
                ]
                prefetched_bytes = sum(map(entry.prefetched_bytes.pop, kinds))
        return ResidencyReport(True, moves, prefetched_bytes)

    # -- moves behind the holder of a time slice -------------------------------------------------

    async def _prefetch(self, order: _Order) -> ResidencyReport:
        """Move kinds beside the holder until an order or another prefetch is next."""
        request = order.request
        await self._background.run(request, order.results, lambda: order.is_preempted)
        entry = self._table.find(request.instance)
        is_complete = entry is not None and not any(
            place.missing_bytes
            for place in entry.places.values()
            if not request.kinds or place.kind in request.kinds
        )
        return ResidencyReport(is_complete, order.results.moves, 0)

    async def _stop_background(self, request: PrepareResidency) -> None:
        """End moves behind the holder; one that brings what the request needs completes."""
        is_helpful = self._background.loads_for(request)
        for order in [one for one in self._orders.values() if one.request.prefetch]:
            order.is_preempted = True
            if not is_helpful:
                await _cancel(order.task)


async def _cancel(*tasks: asyncio.Task[ResidencyReport] | None) -> None:
    """Cancel tasks and wait until they have ended.

    A second cancellation would interrupt the calls by which a task ends its moves.
    """
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        if not task.cancelling():
            task.cancel()
    if running:
        await asyncio.wait(running)
