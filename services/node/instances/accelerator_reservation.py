"""Reserved accelerator of a worker, for an engine that another worker of its gang starts.

That process computes on the accelerators of all workers of its gang. It starts when each of them
has reported that its accelerator is free. When one of these workers is lost, the planner ends the
engine, which cannot run without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.hardware.gpus.nvml import DRIVER_ERRORS
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import (
    Instance,
    InstancePhase,
    InstanceReport,
    Tier,
    TierBytes,
)
from meshrl.common.state.redis.client import StateClient
from meshrl.services.node.instances.budgets import OverBudget
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.instances.role_process import MEMORY_RETRY_S, WorkerContext


class AcceleratorReservation:
    """Stand-in for a `RoleProcess`, with the interface that a process slot uses."""

    pid, restarts = 0, 0
    is_ready, can_stop = False, True  # a reservation has no state to lose
    is_time_sliced = begins_slicing = will_slice = is_moving = has_left = False  # its bytes stay
    children: list[ChildProcess] = []  # noqa: RUF012 (there never are any)

    def __init__(
        self,
        context: WorkerContext,
        desired: DesiredRole,
        others_are_leaving: Callable[[], bool],
        worker_processes: Callable[[], Mapping[int, str]],
    ) -> None:
        """Create a reservation.

        Args:
            others_are_leaving: True while another process is about to release the accelerator.
            worker_processes: The worker's processes, by pid.
        """
        self.desired = desired
        self.name, self.process_key = desired.name, desired.process_key
        self.phase, self.detail, self.tier = InstancePhase.STARTING, "", Tier.ABSENT
        self._context, self._worker_processes = context, worker_processes
        self._others_are_leaving = others_are_leaving
        self._retry_at = 0.0  # time of the next check for room

    def set_desired(self, desired: DesiredRole) -> None:
        """Replace the desired role; tier moves do not concern a reservation."""
        self.desired = desired

    async def start(self) -> None:
        """Reserve the accelerator if it is free; see `poll`."""
        await self.poll()

    async def poll(self) -> None:
        """Reserve the accelerator once other processes have left it, by recording the engine's
        bytes.

        If memory is short or the driver fails, report a failure, and retry after MEMORY_RETRY_S
        seconds.
        """
        if self.phase == InstancePhase.READY or self._now() < self._retry_at:
            return
        if self._others_are_leaving():
            self.detail = "waiting until other instances have left the accelerator"
            return
        context, instance = self._context, self.desired.instance
        try:
            size_bytes = (await context.gpu_memory.estimate_bytes(instance)).total
            first_report = _current_report(instance, instance.reports, instance.ranks[0])
            # else it has the memory already
            if first_report is None or first_report.tier != Tier.ACCELERATOR:
                await context.gpu_memory.check_free(
                    instance, self.name, 0, self._worker_processes()
                )
            context.budgets.record_usage(self.name, TierBytes(accelerator=size_bytes))
        except OverBudget as error:
            context.budgets.remove(self.name)
            self._mark_failed(str(error))
        except (DeadlineExceeded, StateUnavailable, *DRIVER_ERRORS) as error:
            self._mark_failed(str(error))
        else:
            self.phase, self.detail, self.tier = InstancePhase.READY, "", Tier.ACCELERATOR

    async def stop(self, reason: str, *, worker_stops: bool = False) -> None:
        """Free the reserved bytes at once."""
        self._context.budgets.record_exit(self.name)
        self.phase, self.detail, self.tier = InstancePhase.GONE, "", Tier.ABSENT

    async def kill(self, deadline_s: float) -> None:
        """Do nothing: a reservation has no process."""

    def _mark_failed(self, why: str) -> None:
        self.phase, self.detail = InstancePhase.FAILED, why
        self._retry_at = self._now() + MEMORY_RETRY_S

    def _now(self) -> float:
        return self._context.mesh.clock.monotonic()


async def read_reservations(
    state: StateClient, desired: DesiredRole
) -> tuple[list[str], list[str]]:
    """Return the GPU UUIDs for an engine's process, and the workers that have no reservation yet.

    The UUIDs are empty until no worker is missing, and for CPU workers. A gang that is gone counts
    as a missing worker. A process on one worker needs no reservations: both lists are empty.
    """
    if not desired.spans_workers:
        return [], []
    gang = await pool.read_gang(state, desired.gang)
    if gang is None:
        return [], ["its gang"]
    ranks = desired.instance.ranks
    instance = next(
        (candidate for candidate in gang.instances if candidate.id == desired.instance.id), None
    )
    reports = (
        {rank: _current_report(desired.instance, instance.reports, rank) for rank in ranks}
        if instance
        else {}
    )
    ready_ranks = [
        rank for rank, report in reports.items() if report and report.phase == InstancePhase.READY
    ]
    if missing_workers := [gang.workers[rank] for rank in ranks[1:] if rank not in ready_ranks]:
        return [], missing_workers
    uuids = {worker.id: worker.uuid for worker in await pool.read_workers(state)}
    workers = [gang.workers[rank] for rank in ranks]
    return [uuid for uuid in map(uuids.get, workers) if uuid], []


def _current_report(
    instance: Instance, reports: Mapping[int, InstanceReport], rank: int
) -> InstanceReport | None:
    """Return the report of a rank's worker on this generation of the instance."""
    report = reports.get(rank)
    return report if report is not None and report.generation == instance.generation else None
