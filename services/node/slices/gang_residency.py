"""Residency of a gang's workers: cached states, preparations of slices, and prefetches."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from meshrl.common.api.node import (
    PREPARE_TIMEOUT_S,
    PrepareResidency,
    ResidencyReport,
    ResidencyState,
    Worker,
)
from meshrl.common.base.errors import MeshError, StorageFull
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
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
        self._prefetches: dict[tuple[str, str], asyncio.Task[None]] = {}  # by instance and holder
        self._reads: set[asyncio.Task[None]] = set()

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

    async def close(self) -> None:
        """Cancel all tasks."""
        tasks = [*self._prefetches.values(), *self._reads]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_resident(self, ranks: Collection[int]) -> bool:
        """Return True if all instances are known to be fully resident on the workers of ranks."""
        states = self._list_states(ranks)
        return all(state is not None and is_fully_resident(state) for state in states)

    def estimate_switch_s(self, request: SliceRequest) -> float:
        """Return the expected seconds of the moves before a slice; unknown states count as 0."""
        known = [state for state in self._list_states(request.ranks) if state is not None]
        return estimate_switch_s(request.instance, request.kinds, known)

    async def prepare(
        self, request: SliceRequest, computing: list[str], waiting: list[str]
    ) -> list[ResidencyReport]:
        """Bring what a request needs onto the accelerators of all its ranks.

        Raises:
            StorageFull: A worker has no room for the kinds, or for those that must leave.
            ServiceUnavailable: A worker has exited or failed, or exceeded the deadline.
        """
        limit_s = PREPARE_TIMEOUT_S
        if None not in self._list_states(request.ranks):
            estimate_s = self.estimate_switch_s(request)
            limit_s = min(limit_s, PREPARE_FLOOR_S + PREPARE_FACTOR * estimate_s)
        order = _build_order(request, request.ticket, computing, waiting, prefetch=False)
        try:
            return await self._send(request.ranks, order, limit_s)
        except StorageFull:
            raise
        except MeshError as error:
            raise ServiceUnavailable(
                f"the tensors of {request.instance} are not on its accelerators: {error}",
                where=self._mesh.name,
                fix="`meshrl logs` of the gang's workers shows why; the instance requests again",
            ) from error

    def start_prefetch(
        self, request: SliceRequest, holder: SliceRequest, computing: list[str], waiting: list[str]
    ) -> None:
        """Start the prefetch of an instance beside a holder, once for each holder's slice.

        The workers end the prefetch themselves when another order needs the room.
        """
        key = request.instance, holder.ticket
        if key in self._prefetches or self.is_resident(request.ranks):
            return
        ticket = f"{request.instance} beside {holder.ticket}"
        order = _build_order(request, ticket, computing, waiting, prefetch=True)
        self._prefetches[key] = asyncio.create_task(
            self._prefetch(request.ranks, order), name=f"prefetch of {request.instance}"
        )

    def forget_prefetches(self, holders: Collection[str]) -> None:
        """Forget ended prefetches beside slices that are over.

        `holders` are the tickets of current slices.
        """
        for key, task in list(self._prefetches.items()):
            if key[1] not in holders and task.done():
                del self._prefetches[key]

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
        clock, what = self._mesh.clock, f"moving the tensors of {order.instance}"
        try:
            async with clock.timeout(limit_s, what), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._prepare_on(one, order)) for one in workers]
        except* MeshError as errors:
            raise _first_error(errors) from None
        finally:
            for worker in workers:
                if worker != self._worker:
                    self._cached.pop(worker, None)
                    self._run(self._read_state(worker), f"residency of {worker}")
        return [task.result() for task in tasks]

    async def _prepare_on(self, worker: str, order: PrepareResidency) -> ResidencyReport:
        if worker == self._worker:
            return await self._own.prepare(order)
        return await self._mesh.ref(worker_name(worker)).call(Worker.prepare_residency, order)

    async def _read_state(self, worker: str) -> None:
        record = self._record
        try:
            state = await self._mesh.ref(worker_name(worker)).call(Worker.read_residency, None)
        except MeshError:  # stays unknown: the next slice there is prepared
            return
        if record == self._record:
            self._cached[worker] = state

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    def _list_workers(self, ranks: Collection[int]) -> list[str]:
        return [self._workers[rank] for rank in sorted(ranks)]

    def _list_states(self, ranks: Collection[int]) -> Sequence[ResidencyState | None]:
        return [
            self._own.state() if worker == self._worker else self._cached.get(worker)
            for worker in self._list_workers(ranks)
        ]


def _build_order(
    request: SliceRequest, ticket: str, computing: list[str], waiting: list[str], *, prefetch: bool
) -> PrepareResidency:
    return PrepareResidency(
        ticket,
        request.instance,
        request.generation,
        list(request.kinds),
        computing,
        prefetch,
        waiting,
    )


def _first_error(errors: ExceptionGroup[MeshError]) -> MeshError:
    first = errors.exceptions[0]
    return _first_error(first) if isinstance(first, ExceptionGroup) else first
