"""Residency of a gang's workers: cached states, preparations of slices, and prefetches."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from meshrl.common.api.node import (
    PREPARE_TIMEOUT_S,
    KindUse,
    PrepareResidency,
    ResidencyReport,
    ResidencyState,
    Worker,
)
from meshrl.common.base.errors import MeshError, StorageFull
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.services.node.slices.residency import Residency
from meshrl.services.node.slices.slice_policy import SliceRequest
from meshrl.services.node.slices.switch_costs import estimate_switch_s, is_fully_resident

# Deadline of a preparation, by its estimate: disks and hosts are shared with others.
PREPARE_FLOOR_S = 60.0
PREPARE_FACTOR = 8.0


class GangResidency:
    """Residency of the workers of one gang, as seen from its first worker.

    Its own worker's state is always current. Those of other workers are cached until the gang's
    record changes, and read again after each preparation and prefetch.
    """

    def __init__(self, mesh: Mesh, worker: str, own: Residency) -> None:
        self._mesh, self._worker, self._own = mesh, worker, own
        self._workers: tuple[str, ...] = ()  # by rank
        self._record: object = None  # what the cached states depend on
        self._cached: dict[str, ResidencyState] = {}  # by worker; missing: unknown
        # by instance: tickets of its request, and of the slice beside which a prefetch was ordered
        self._prefetches: dict[str, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # prefetches, and reads of states

    def set_gang(self, gang: Gang | None) -> None:
        """Replace the gang's record; forget the states of other workers if it has changed."""
        self._workers = gang.workers if gang is not None else ()
        record = gang and (
            gang.id,
            gang.workers,
            [(one.id, one.generation, one.epoch, one.phase) for one in gang.instances],
        )
        if record != self._record:
            self._record = record
            self._cached.clear()
            self._prefetches.clear()

    async def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_resident(self, ranks: Collection[int]) -> bool:
        """Return True if all is fully resident on the workers of ranks, as last known."""
        states = self._list_states(ranks)
        return all(state is not None and is_fully_resident(state) for state in states)

    def needs_no_order(self, ranks: Collection[int]) -> bool:
        """Return True if slices on these ranks need no moves.

        Another worker with a budget decides itself: a process that started there may have moved the
        kinds of others since its state was read.
        """
        others = [self._cached.get(w) for w in self._list_workers(ranks) if w != self._worker]
        is_unlimited = all(state is not None and not state.accelerator_budget for state in others)
        return is_unlimited and self.is_resident(ranks)

    def estimate_switch_s(self, request: SliceRequest) -> float:
        """Return the expected seconds of the moves before a slice; unknown states count as 0."""
        known = [state for state in self._list_states(request.ranks) if state is not None]
        return estimate_switch_s(request.instance, request.kinds, known)

    async def prepare(
        self, request: SliceRequest, computing: list[KindUse], expected: list[KindUse]
    ) -> list[ResidencyReport]:
        """Bring what a request needs onto the accelerators of all its ranks.

        Raises:
            StorageFull: A worker has no room for the kinds, or for those that must leave.
            ServiceUnavailable: A worker has exited or failed, or exceeded the deadline.
        """
        try:
            unknown = set(self._list_workers(request.ranks)) - {self._worker, *self._cached}
            await run_all(self._read_state(worker) for worker in sorted(unknown))
            if self.needs_no_order(request.ranks):
                return []
            limit_s = PREPARE_FLOOR_S + PREPARE_FACTOR * self.estimate_switch_s(request)
            order = _build_order(request, request.ticket, computing, expected, prefetch=False)
            return await self._send(request.ranks, order, min(limit_s, PREPARE_TIMEOUT_S))
        except StorageFull:
            raise
        except MeshError as error:
            raise ServiceUnavailable(
                f"the tensors of {request.instance} are not on its accelerators: {error}",
                where=self._mesh.name,
                fix="`meshrl logs` of the gang's workers shows why; the instance requests again",
            ) from error

    def start_prefetch(
        self,
        request: SliceRequest,
        holder: SliceRequest | None,
        computing: list[KindUse],
        expected: list[KindUse],
    ) -> None:
        """Start the prefetch beside a holder's slice, or beside none, once for the next request.

        The workers end the prefetch themselves when another order needs the room.
        """
        key = request.ticket, holder.ticket if holder is not None else ""
        if self._prefetches.get(request.instance) == key or self.is_resident(request.ranks):
            return
        self._prefetches[request.instance] = key
        ticket = f"{key[0]} beside {key[1]}"
        order = _build_order(request, ticket, computing, expected, prefetch=True)
        self._run(self._prefetch(request.ranks, order), f"prefetch of {request.instance}")

    async def _prefetch(self, ranks: Collection[int], order: PrepareResidency) -> None:
        try:
            await self._send(ranks, order, PREPARE_TIMEOUT_S)
        except MeshError as error:  # the preparation of the slice does it again, or fails
            self._mesh.log.info("a prefetch failed", resident=order.instance, error=str(error))

    async def _send(
        self, ranks: Collection[int], order: PrepareResidency, limit_s: float
    ) -> list[ResidencyReport]:
        """Send an order to the workers of ranks; after an error the others are cancelled."""
        workers = self._list_workers(ranks)
        reports: dict[str, ResidencyReport] = {}

        async def send_to(worker: str) -> None:
            reports[worker] = await self._prepare_on(worker, order)

        try:
            async with self._mesh.clock.timeout(limit_s, f"moving the tensors of {order.instance}"):
                await run_all(send_to(worker) for worker in workers)
        finally:
            for worker in workers:
                if worker != self._worker:
                    self._run(self._refresh_state(worker), f"residency of {worker}")
        return list(reports.values())

    async def _prepare_on(self, worker: str, order: PrepareResidency) -> ResidencyReport:
        if worker == self._worker:
            return await self._own.prepare(order)
        return await self._mesh.ref(worker_name(worker)).call(Worker.prepare_residency, order)

    async def _read_state(self, worker: str) -> None:
        record = self._record
        state = await self._mesh.ref(worker_name(worker)).call(Worker.read_residency, None)
        if record == self._record:
            self._cached[worker] = state

    async def _refresh_state(self, worker: str) -> None:
        try:
            await self._read_state(worker)
        except MeshError:  # the next preparation reads it
            self._cached.pop(worker, None)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _list_workers(self, ranks: Collection[int]) -> list[str]:
        return [self._workers[rank] for rank in sorted(ranks)]

    def _list_states(self, ranks: Collection[int]) -> Sequence[ResidencyState | None]:
        return [
            self._own.state() if worker == self._worker else self._cached.get(worker)
            for worker in self._list_workers(ranks)
        ]


def _build_order(
    request: SliceRequest,
    ticket: str,
    computing: list[KindUse],
    expected: list[KindUse],
    *,
    prefetch: bool,
) -> PrepareResidency:
    return PrepareResidency(
        ticket,
        request.instance,
        request.generation,
        list(request.kinds),
        computing,
        prefetch,
        expected,
    )
