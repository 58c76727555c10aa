"""Instances of one worker: one concurrent task for each process name.

A change, failure or slow end of one instance does not delay another. Only processes of the same
name follow one another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrl.common.api.stats import InstanceStats
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import InstancePhase, InstanceReport, Tier
from meshrl.services.node.instances.accelerator_reservation import (
    AcceleratorReservation,
    read_reservations,
)
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.instances.offloaded_state import find_offloaded_state
from meshrl.services.node.instances.role_process import (
    DELETE_TIMEOUT_S,
    RoleProcess,
    WorkerContext,
    remove_with_parts,
)

STARTING_POLL_S = 0.1  # while a process starts or moves, its readiness triggers no message
POLL_S = 0.5
KILL_S = 8.0  # for the kernel to end a process, within the slice scheduler's own deadline
MAX_OLD_LOGS = 20  # of instances that are gone; each has a name and a log of its own
PER_INSTANCE_PREFIXES = ("engine/", "hybrid/")  # processes that are named after their instance
IDLE_POLL_S = 5.0  # when all is reconciled; a change wakes it earlier


class ProcessSlot:
    """Slot of one process name on this worker, which one instance after another occupies."""

    def __init__(self, owner: WorkerInstances, name: str) -> None:
        self.name = name
        self.desired: DesiredRole | None = None
        self.process: RoleProcess | AcceleratorReservation | None = None
        # further workers whose accelerators its process computes on
        self._awaited_workers: list[str] = []
        self._owner, self._context = owner, owner.context
        self._wakeup = asyncio.Event()
        self._last_report: InstanceReport | None = None  # that the record has taken
        # Without a process: the instance that is to be asleep, and the tier of its offloaded state.
        self._offloaded: tuple[str, Tier] | None = None

    def set_desired(self, desired: DesiredRole | None) -> None:
        """Set the desired state of the record; None: the record no longer has the instance."""
        if desired is not None and desired.last_report != self._last_report:
            self._last_report = None  # the record disagrees: the report is sent again
        self.desired, process = desired, self.process
        if desired and process and desired.process_key == process.process_key:
            process.set_desired(desired)
        self._wakeup.set()

    @property
    def must_leave(self) -> bool:
        """True while the slot's process may compute on the accelerator and is desired elsewhere."""
        process, desired = self.process, self.desired
        if process is None or self._must_stop(process, desired):
            return process is not None
        assert desired is not None
        return desired.instance.tier != Tier.ACCELERATOR and not process.has_left

    @property
    def is_leaving(self) -> bool:
        """True if the slot's process is about to release the accelerator."""
        process = self.process
        if process is None or process.phase != InstancePhase.FAILED:
            return self.must_leave
        return self._must_stop(process, self.desired)

    async def run(self) -> None:
        """Reconcile until nothing is desired, running or offloaded.

        A poll that Redis does not answer changes nothing.
        """
        while self.desired is not None or self.process is not None or self._offloaded is not None:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._reconcile()
                await self._publish_report()
            with contextlib.suppress(DeadlineExceeded):
                async with self._context.mesh.clock.timeout(self._poll_interval_s, "news"):
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def stop(self) -> None:
        """Stop the slot's process with the short limits of a worker that exits."""
        if self.process is not None:
            await self.process.stop("the worker exits", worker_stops=True)

    async def _reconcile(self) -> None:
        """Take one step towards the desired state: stop, poll, or start the process."""
        process, desired = self.process, self.desired
        if self._offloaded is not None and (
            desired is None or desired.instance.id != self._offloaded[0]
        ):
            await self._delete_offloaded_state()
            self._offloaded = None
        if process is not None and self._must_stop(process, desired):
            await self._stop_process(process, desired)
        elif process is not None:
            assert desired is not None
            process.set_desired(desired)  # it may have arrived during another step
            await process.poll()
        elif desired is not None and desired.is_asleep:
            if self._offloaded is None:
                tier, usage = await find_offloaded_state(self._context, self.name)
                self._context.budgets.record_usage(self.name, usage)
                self._offloaded = desired.instance.id, tier
        elif desired is not None and not desired.is_absent:
            self._offloaded = None
            gpu_uuids, self._awaited_workers = await read_reservations(
                self._context.mesh.state, desired
            )
            if not self._awaited_workers:
                self.process = self._create_process(desired, gpu_uuids)
                await self.process.start()

    def _create_process(
        self, desired: DesiredRole, gpu_uuids: Sequence[str]
    ) -> RoleProcess | AcceleratorReservation:
        owner = self._owner

        def get_worker_processes() -> dict[int, str]:
            return {child.pid: child.name for child in owner.children}

        if desired.is_reservation:
            return AcceleratorReservation(
                self._context, desired, self._others_are_leaving, get_worker_processes
            )
        hooks = (
            owner.leases,
            self._wakeup.set,
            owner.on_instance_exit,
            self._list_awaited,
            self._others_must_leave,
            self._others_begin_slicing,
            get_worker_processes,
        )
        return RoleProcess(self._context, desired, *hooks, gpu_uuids)

    def _others_are_leaving(self) -> bool:
        return any(other.is_leaving for other in self._owner.slots if other is not self)

    def _list_awaited(self) -> dict[str, bool]:
        """Return the other processes that can soon leave the accelerator; True: they leave now."""
        others = ((one, one.process) for one in self._owner.slots if one is not self)
        known = {one.name: (one.is_leaving, p is not None and p.will_slice) for one, p in others}
        return {name: is_leaving for name, (is_leaving, _) in known.items() if any(known[name])}

    def _others_must_leave(self) -> bool:
        return any(other.must_leave for other in self._owner.slots if other is not self)

    def _others_begin_slicing(self) -> bool:
        processes = (other.process for other in self._owner.slots if other is not self)
        return any(process.begins_slicing for process in processes if process is not None)

    def _must_stop(
        self, process: RoleProcess | AcceleratorReservation, desired: DesiredRole | None
    ) -> bool:
        """Return True if the process serves another instance, or the desired tier needs none."""
        if desired is None or desired.process_key != process.process_key:
            return True
        # A starting process computes without a time slice, while others have the accelerator.
        return (desired.is_absent and process.can_stop) or (
            desired.is_asleep and not process.is_ready
        )

    async def _stop_process(
        self, process: RoleProcess | AcceleratorReservation, desired: DesiredRole | None
    ) -> None:
        """Report that the process stops, then stop it; delete its offloaded state if no longer
        needed.
        """
        process.phase = InstancePhase.DRAINING
        await self._publish_report()
        await process.stop(_stop_reason(process, desired))
        self.process = None
        if desired is None or desired.instance.id != process.process_key[0]:
            await self._delete_offloaded_state()
        self._wakeup.set()

    async def _delete_offloaded_state(self) -> None:
        """Delete the state that a process of this name has offloaded here: no process will restore
        it.
        """
        context = self._context
        context.segments.delete_process(self.name)
        file = make_offload_path(
            context.mesh.settings.make_offload_directory(context.mesh.name), self.name
        )
        await context.mesh.host.run_blocking(remove_with_parts, file, deadline_s=DELETE_TIMEOUT_S)
        context.budgets.remove(self.name)
        await self._owner.retire_log(self.name)

    async def _publish_report(self) -> None:
        """Write a changed report to the record, or request a new read of a stale record."""
        desired = self.desired
        if desired is None:
            return
        report = self._build_report(desired)
        if report == self._last_report:
            return
        mesh, context = self._context.mesh, self._context
        if await pool.report_instance(
            mesh.state, context.worker, desired.gang, desired.instance.id, report
        ):
            self._last_report = report
        else:
            self._owner.on_stale_record()

    def _build_report(self, desired: DesiredRole) -> InstanceReport:
        """Build the report of this worker on the desired instance."""
        process, instance = self.process, desired.instance
        if process is None:
            is_away, detail = desired.is_absent or desired.is_asleep, ""
            tier = self._offloaded[1] if desired.is_asleep and self._offloaded else Tier.ABSENT
            phase = InstancePhase.GONE if is_away else InstancePhase.STARTING
            if self._awaited_workers and phase == InstancePhase.STARTING:
                detail = f"waiting for {', '.join(self._awaited_workers)} to reserve accelerators"
            if desired.is_asleep and tier == instance.tier:
                phase = InstancePhase.READY
        else:
            phase, tier, detail = process.phase, process.tier, process.detail
            if process.process_key != desired.process_key:
                phase, detail = InstancePhase.DRAINING, f"the previous {process.name} is stopping"
        return InstanceReport(
            rank=desired.rank,
            generation=instance.generation,
            epoch=instance.epoch,
            token=self._context.mesh.token,
            phase=phase,
            tier=tier,
            detail=detail,
            usage=self._context.budgets.get_usage(self.name),
        )

    @property
    def _poll_interval_s(self) -> float:
        process = self.process
        if process is None:
            return STARTING_POLL_S if self._awaited_workers else POLL_S
        if self._last_report is None:  # Redis was unreachable, or the desired state has changed
            return POLL_S
        if process.phase == InstancePhase.READY and process.desired is self.desired:
            return IDLE_POLL_S
        return (
            STARTING_POLL_S
            if process.phase in (InstancePhase.STARTING, InstancePhase.MOVING)
            else POLL_S
        )


class WorkerInstances:
    """Process slots of a worker; leaving `async with` ends their processes."""

    def __init__(
        self,
        context: WorkerContext,
        on_stale_record: Callable[[], None],
        on_instance_exit: Callable[[str], None],
    ) -> None:
        """Create the slots.

        Args:
            on_stale_record: Called when the record has changed since it was read.
            on_instance_exit: Called when a process of an instance has exited.
        """
        self.context, mesh = context, context.mesh
        self.on_stale_record, self.on_instance_exit = on_stale_record, on_instance_exit
        self.leases = LeaseWatch(mesh.state, mesh.clock, mesh.settings.host, lambda: self.children)
        self._slots: dict[str, ProcessSlot] = {}
        self._old_logs: deque[Path] = deque()  # the oldest first
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> WorkerInstances:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(slot.stop() for slot in self._slots.values()))
        self._failure.cancel()

    def set_desired(self, desired: Mapping[str, DesiredRole]) -> None:
        """Set the desired role by process name; all other processes end."""
        for name in sorted(self._slots.keys() | desired.keys()):
            slot = self._slots.get(name)
            if slot is None:
                slot = self._slots[name] = ProcessSlot(self, name)
            slot.set_desired(desired.get(name))
            if name not in self._tasks:
                self._start_slot(slot)

    async def delete_other_files(self, desired: Mapping[str, DesiredRole]) -> None:
        """Delete offload files that belong to none of the desired processes.

        They remain from an earlier run of this worker.
        """
        mesh = self.context.mesh
        directory = Path(mesh.settings.make_offload_directory(mesh.name))
        file_names = {make_offload_path(directory, name).name for name in desired}
        await mesh.host.run_blocking(
            _delete_others, directory, file_names, deadline_s=DELETE_TIMEOUT_S
        )

    async def retire_log(self, name: str) -> None:
        """Mark an instance's log as old; delete the oldest beyond MAX_OLD_LOGS.

        Only names that no other instance reuses count.
        """
        log = self.context.log_path(name)
        if not name.startswith(PER_INSTANCE_PREFIXES) or log in self._old_logs:
            return
        self._old_logs.append(log)
        if len(self._old_logs) > MAX_OLD_LOGS:
            oldest = self._old_logs.popleft()
            await self.context.mesh.host.run_blocking(
                remove_with_parts, oldest, deadline_s=DELETE_TIMEOUT_S
            )

    async def watch_leases(self) -> None:
        """Detect expired leases of the processes until cancelled.

        Raises the error of a slot: Fenced after the loss of the worker's own lease, or an
        unexpected one.
        """
        watch_task = asyncio.create_task(self.leases.run(), name="watch leases")
        try:
            await asyncio.wait([watch_task, self._failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch_task.cancel()
        await (self._failure if self._failure.done() else watch_task)

    async def kill(self, instance: str, generation: int, why: str) -> None:
        """Kill an instance's process of this generation, if there is one, and return when it is
        dead.

        The supervisor restarts it. Raises DeadlineExceeded after KILL_S seconds.
        """
        for process in self.processes:
            if process.process_key == (instance, generation):
                self.context.mesh.log.error("killed", process=process.name, why=why)
                await process.kill(KILL_S)

    async def is_process(self, name: str, incarnation: str, owner: str | bytes) -> bool:
        """Return True if the process of that name has this incarnation, and proved its key."""
        slot = self._slots.get(name)
        process = slot.process if slot is not None else None
        return isinstance(process, RoleProcess) and await process.is_identity(incarnation, owner)

    @property
    def children(self) -> list[ChildProcess]:
        return [child for process in self.processes for child in process.children]

    @property
    def slots(self) -> list[ProcessSlot]:
        """Slots of every name that has, or should have, a process here."""
        return list(self._slots.values())

    def stats(self) -> list[InstanceStats]:
        """Return the figures of each process or reservation of this worker."""
        return [
            InstanceStats(
                process.process_key[0],
                process.desired.instance.job,
                process.desired.instance.role,
                process.phase,
                process.tier,
                process.pid,
                process.restarts,
            )
            for process in self.processes
        ]

    @property
    def processes(self) -> list[RoleProcess | AcceleratorReservation]:
        """Processes and reservations of this worker."""
        return [slot.process for slot in self._slots.values() if slot.process is not None]

    def _start_slot(self, slot: ProcessSlot) -> None:
        task = asyncio.create_task(slot.run(), name=f"instance {slot.name}")
        self._tasks[slot.name] = task
        task.add_done_callback(lambda task: self._slot_finished(slot, task))

    def _slot_finished(self, slot: ProcessSlot, task: asyncio.Task[None]) -> None:
        del self._tasks[slot.name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None and slot.desired is None:
            del self._slots[slot.name]
        elif error is None:  # it was desired again as it ended
            self._start_slot(slot)
        elif not self._failure.done():
            self._failure.set_exception(error)


def _delete_others(directory: Path, file_names: set[str]) -> None:
    """Delete the offload files in a directory except those named."""
    for path in directory.glob("*.kept*"):
        if path.name.partition(".kept")[0] + ".kept" not in file_names:
            path.unlink(missing_ok=True)


def _stop_reason(process: RoleProcess | AcceleratorReservation, desired: DesiredRole | None) -> str:
    id, generation = process.process_key
    if desired is None:
        return f"{id} is not on record any more"
    if desired.is_asleep and desired.process_key == process.process_key:
        return f"{id} must sleep from epoch {desired.instance.epoch} on, and is not running"
    if desired.is_absent:
        return f"{id} must be absent from epoch {desired.instance.epoch} on"
    return (
        f"{desired.process_key[0]} is desired in generation {desired.process_key[1]} after "
        f"{generation}"
    )
