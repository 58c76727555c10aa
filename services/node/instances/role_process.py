"""Process of one generation of an instance, from its start until its end.

It is started, watched until it is ready, moved to the desired tier, drained and ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshrl.common.api.calls.role import RoleControl, SetTier
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    MeshError,
    NotFound,
    Refused,
    StateUnavailable,
    StorageFull,
)
from meshrl.common.base.files.offload_media import make_segment_key
from meshrl.common.base.host.settings import (
    ACCELERATOR_ENV,
    DEVICE_ENV,
    WORKER_ENV,
    make_offload_path,
)
from meshrl.common.hardware.gpus.nvml import DRIVER_ERRORS
from meshrl.common.hardware.gpus.visibility import CUDA_ENV
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis.failure import Failure, read_log_end
from meshrl.common.mesh.process.supervision.exit_reports import ExitReport, ExitReportSender
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import (
    START_FAILED_STATUS,
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.mesh.transport.address import read_key_text
from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.common.state.pool.store.host_notices import UNKNOWN_TIME, read_notice
from meshrl.common.state.pool.workers.rows import InstancePhase, Tier, TierBytes
from meshrl.services.node.instances.accelerator_room import AcceleratorRoom, UncountedRoom
from meshrl.services.node.instances.budgets import Budgets, OverBudget
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull, GpuMemoryGuard
from meshrl.services.node.instances.segments import MemorySegments
from meshrl.services.node.instances.startup import NO_PROGRESS_TIMEOUT_S, Startup, StartupState

NICE = 5  # below the services: a step may wait, a heartbeat may not
# One thread a process (more are slower when cores are shared). The heap retains freed memory,
# so that a step does not fault the pages of its activations in again.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# Restarts in seconds. Their delays add up to the time for which an error of its own must last to
# end the job (`process_ended.lua`), so that it is reported before the budget is exhausted.
RESTART_BUDGET = (8, 60.0)
DRAIN_S = 5.0
GRACE_S = 5.0  # from SIGTERM to SIGKILL
UNKNOWN_END_S = 20.0  # until a host's announced end without a time: clouds give 30 s
MAX_LEAVE_S = 120.0
WORKER_STOP_S = 1.0  # for both, when the whole worker stops
DELETE_TIMEOUT_S = 30.0  # to delete files of some 100 GB
TRY_AGAIN_S = 30.0  # after the restart budget is exhausted
# After a clean exit of a process that is still desired: its job has resumed.
RESTART_AFTER_SUCCESS_S = 3.0
SET_TIER_RETRY_S = 1.0  # a process that rejects a move now may soon accept it
ROOM_POLL_S = 0.2  # while others leave the accelerator
RESTART_ROOM_TIMEOUT_S = 120.0  # for the same, before a restart, until that is a failure
MEMORY_RETRY_S = 5.0  # until the next check for room
# An error that a retry may not repeat, such as one of a disk or of a peer of the process. After
# this time it is reported as a failure, so that the planner or a person decides otherwise.
SET_TIER_ERROR_TOLERANCE_S = 30.0
WAITING_FOR_ROOM = "waiting until the tensors of other instances have left the accelerator"
WAITING_FOR_SLICES = "waiting until the other instances compute in time slices only"
STARTUP_TIMEOUT = Failure(
    "NotReady",
    f"the process was killed: its start made no progress for {NO_PROGRESS_TIMEOUT_S:g} s",
    fix="Read the end of its log; if the model loads slowly, use a faster disk",
)


@dataclass(frozen=True)
class WorkerContext:
    """Objects that a worker shares with the supervisors of its processes."""

    mesh: Mesh
    worker: str  # id
    commands: dict[str, list[str]]
    log_directory: Path
    budgets: Budgets
    segments: MemorySegments
    gpu_memory: GpuMemoryGuard
    accelerator: str = "cpu:0"  # the worker's, by name
    room: AcceleratorRoom = field(default_factory=UncountedRoom)  # beside other instances

    def log_path(self, name: str) -> Path:
        return self.log_directory / (name.replace("/", "-") + ".log")


class RoleProcess(SupervisorHooks):
    """Supervisor of the process that serves one generation of an instance.

    It starts the process, restarts it after an exit, and moves it to the desired tier. At most one
    process runs at a time. `poll` must be called repeatedly.
    """

    def __init__(
        self,
        context: WorkerContext,
        desired: DesiredRole,
        leases: LeaseWatch,
        on_change: Callable[[], None],
        on_instance_exit: Callable[[str], None] = lambda instance: None,
        list_awaited: Callable[[], dict[str, bool]] = dict,
        others_must_leave: Callable[[], bool] = lambda: False,
        others_begin_slicing: Callable[[], bool] = lambda: False,
        worker_processes: Callable[[], Mapping[int, str]] = dict,
        gpu_uuids: Sequence[str] = (),
    ) -> None:
        """Create a supervisor; `start` starts the process.

        Args:
            on_change: Called when the process's state changes.
            on_instance_exit: Called with the instance's id when a process has exited.
            list_awaited: Names of the processes that can soon leave; True for those that leave now.
            others_must_leave: True until all processes that are desired elsewhere have left.
            others_begin_slicing: True while another process ends a piece without a time slice.
            worker_processes: Names of the worker's processes, by pid.
            gpu_uuids: UUIDs of the GPUs that the process may see; empty: its worker's GPU.
        """
        self._visible_gpus_env = {CUDA_ENV: ",".join(gpu_uuids)} if gpu_uuids else {}
        self.desired = desired  # of this process; its tier and epoch may change
        self.name, self.process_key = desired.name, desired.process_key
        self.phase, self.detail = InstancePhase.STARTING, ""
        self.tier = Tier.ABSENT  # tier of its tensors
        self.restarts = 0
        self.supervisor = Supervisor(context.mesh.host, context.mesh.clock, hooks=self)
        self._context, self._mesh = context, context.mesh
        self._leases, self._on_change, self._on_instance_exit = leases, on_change, on_instance_exit
        self._list_awaited, self._worker_processes = list_awaited, worker_processes
        self._others_must_leave = others_must_leave
        self._others_begin_slicing = others_begin_slicing
        self._exit_reports = ExitReportSender(self._mesh.state, self._mesh.clock)
        self._log_path = context.log_path(self.name)
        self._has_exit_error = False  # its last exit has an error as the reason
        self._startup = Startup(self._mesh, desired)
        self._timed_out_pid = 0  # pid of the process that was killed for it
        self.is_ready = False  # it has reported that it is ready
        self._reached: tuple[Tier, bool, int] | None = None  # tier, time-sliced, epoch
        self._takes_slices = desired.instance.time_sliced  # as started, or as it has confirmed
        self._tier_task: asyncio.Task[None] | None = None
        self.is_moving = False  # the whole process changes its tier
        self._estimate: SliceBytes | None = None  # of its accelerator bytes; None: not yet
        self._retry_at = 0.0  # when a rejected or failed move is retried
        # the report on record
        self._reported_rejection: tuple[InstancePhase, type[MeshError], Collection[str]] | None = (
            None
        )
        self._is_down = False  # it has failed: only a poll starts it again
        self._succeeded = False  # its last exit was without an error
        self._failing_since: float | None = None  # since when errors keep it from its tier

    @property
    def children(self) -> list[ChildProcess]:
        return list(self.supervisor.children.values())

    @property
    def pid(self) -> int:
        """Pid of the process; 0: none runs."""
        return next((child.pid for child in self.children), 0)

    async def is_identity(self, incarnation: str, owner: str | bytes) -> bool:
        """Return True if the running process has this incarnation, and its key if it has one."""
        entry = await self._startup.find_entry(self.pid, incarnation) if self.pid else None
        has_key = isinstance(owner, str)
        return entry is not None and (not has_key or read_key_text(entry.address) == owner)

    @property
    def is_time_sliced(self) -> bool:
        """True if it should compute in time slices.

        One that should not ends when it has left the accelerator, or is alone there.
        """
        must_leave = self.desired.instance.tier != Tier.ACCELERATOR
        is_beside_others = not self.has_left and (must_leave or self._others_must_leave())
        return self.desired.instance.time_sliced or (self._takes_slices and is_beside_others)

    @property
    def has_left(self) -> bool:
        """True if all its tensors have left the accelerator, so that it computes nothing."""
        return self._reached is not None and self.tier != Tier.ACCELERATOR and not self.is_moving

    @property
    def will_slice(self) -> bool:
        """True while it starts or wakes, after which it leaves in the time slices of others."""
        is_arriving = bool(self.pid) and (self._reached is None or self.is_moving)
        return is_arriving and self.is_time_sliced and self.phase != InstancePhase.FAILED

    @property
    def begins_slicing(self) -> bool:
        """True while it may compute without a time slice that others need."""
        is_computing = self.is_ready and not self.has_left
        return is_computing and self.is_time_sliced and not self._takes_slices

    @property
    def can_stop(self) -> bool:
        """True if a stop loses nothing: the process has released its state, or is not ready yet."""
        absent = self._reached is not None and self._reached[0] == Tier.ABSENT
        return absent or not self.is_ready

    def set_desired(self, desired: DesiredRole) -> None:
        """Replace the desired state by that of the record.

        A new tier, slicing or epoch is tried at once: rejections of the earlier state no longer
        count.
        """
        earlier_target, self.desired = self._target, desired
        if self._target == earlier_target:
            return
        self._retry_at, self._failing_since = 0.0, None
        if self.phase == InstancePhase.FAILED:
            is_moving = self._reached is not None
            phase = InstancePhase.MOVING if is_moving else InstancePhase.STARTING
            self._enter_phase(
                phase, f"from {self.tier} to {desired.instance.tier}" if is_moving else ""
            )

    async def start(self) -> None:
        """Start the process, or report why this host cannot; `poll` retries.

        Too little memory and an unknown amount of free memory are reported in `phase` and `detail`.
        A command that cannot be started is also reported to Redis, which may fail the job.
        """
        self._is_down = False
        try:
            if awaited := await self._reserve_room():
                self._is_down, self._retry_at = True, self._now() + ROOM_POLL_S
                if self.detail != awaited:
                    self._enter_phase(InstancePhase.STARTING, awaited)
                return
            self._context.budgets.check_start(self.name)
            await self._check_gpu_memory()
            self._enter_phase(InstancePhase.STARTING, "")
            await self.supervisor.add(self._make_spec())
        except OverBudget as error:  # others are about to release some, or the planner errs
            self._is_down = True
            others = self._list_awaited()
            phase = InstancePhase.STARTING if others else InstancePhase.FAILED
            self._report_rejection(phase, error, others)
            if not any(others.values()):  # a start lasts
                self._retry_at = self._now() + MEMORY_RETRY_S
            elif isinstance(error, GpuMemoryFull):  # asking the driver takes longer than a sum
                self._retry_at = self._now() + SET_TIER_RETRY_S
        except (DeadlineExceeded, ServiceUnavailable, StateUnavailable, *DRIVER_ERRORS) as error:
            self._is_down = True  # the free memory is unknown, or the gang grants no time slice
            is_redis_away = isinstance(error, StateUnavailable | ServiceUnavailable)
            phase = InstancePhase.STARTING if is_redis_away else InstancePhase.FAILED
            self._report_rejection(phase, error)
            self._retry_at = self._now() + MEMORY_RETRY_S
        except (OSError, ConfigError) as error:  # no process, memory or log available now
            self._is_down = True
            failure = Failure.from_error(error)
            self._enter_phase(InstancePhase.FAILED, f"{self.name} cannot be started: {failure}")
            self._retry_at = self._now() + TRY_AGAIN_S
            child_exit = ChildExit(
                START_FAILED_STATUS,
                "the process cannot be started",
                failure,
                final=failure.is_fatal,
            )
            await self._report_exit(child_exit)

    def _make_spec(self) -> ChildSpec:
        """Make the command of the next process."""
        self._takes_slices = self.is_time_sliced
        instance = replace(self.desired.instance, time_sliced=self._takes_slices)
        return ChildSpec(
            self.name,
            replace(self.desired, instance=instance).build_argv(self._context.commands),
            env={
                **ENVIRONMENT,
                **self._visible_gpus_env,
                WORKER_ENV: self._mesh.name,
                DEVICE_ENV: self._context.accelerator.partition(":")[0],
                ACCELERATOR_ENV: self._context.accelerator,
            },
            log=self._log_path,
            restart="on_failure",
            budget=RESTART_BUDGET,
            niceness=NICE + self._mesh.settings.nice,
        )

    async def _reserve_room(self) -> str:
        """Reserve room beside the instances with which the process shares the accelerator.

        Return what it waits for; empty once the room is reserved. Raises the errors of
        `AcceleratorRoom.reserve`.
        """
        instance, context = self.desired.instance, self._context
        if instance.tier != Tier.ACCELERATOR or not context.room.is_limited:
            return ""
        if not self.is_time_sliced and not self._others_must_leave():
            return ""
        if self.is_time_sliced and self._others_begin_slicing():
            return WAITING_FOR_SLICES
        peak_bytes = context.budgets.get_peak_accelerator_bytes(self.name)
        if self._estimate is None:
            self._estimate = await context.gpu_memory.estimate_bytes(instance)
        context_bytes = context.gpu_memory.context_bytes
        needs = SliceBytes(*(max(1, size - context_bytes, peak_bytes) for size in self._estimate))
        if not self.is_time_sliced:  # it starts beside those that leave only if it fits
            try:
                context.budgets.check_room(self.name, Tier.ACCELERATOR, needs.total)
            except OverBudget:
                if any(self._list_awaited().values()):
                    return WAITING_FOR_ROOM
                raise  # another one cannot leave
            return ""
        is_reserved = context.room.reserve(self.desired, needs)
        return "" if is_reserved else WAITING_FOR_ROOM

    async def _check_gpu_memory(self) -> None:
        """Raise GpuMemoryFull if other programs have the memory that the process needs."""
        instance, context = self.desired.instance, self._context
        if instance.tier == Tier.ACCELERATOR:
            peak_bytes = context.budgets.get_peak_accelerator_bytes(self.name)
            await context.gpu_memory.check_free(
                instance, self.name, peak_bytes, self._worker_processes()
            )

    async def stop(self, reason: str, *, worker_stops: bool = False) -> None:
        """Drain the process for up to DRAIN_S, then end it with SIGTERM, and SIGKILL after GRACE_S.

        A process that is not ready is not drained. With `worker_stops` both limits are
        WORKER_STOP_S. The announced end of the host extends the drain by the time until then.
        """
        if worker_stops:
            self._exit_reports.stop()
        was_ready, self.is_ready = self.is_ready, False
        self._enter_phase(InstancePhase.DRAINING, reason)
        self._context.room.cancel_reservation(self.name)
        if (tier_task := self._tier_task) is not None:
            tier_task.cancel()
            await asyncio.wait([tier_task])
        if was_ready and self.name in self.supervisor.children:
            ref, deadline_s = self._mesh.ref(self.name), WORKER_STOP_S
            if not worker_stops:
                deadline_s = DRAIN_S + await self._read_leave_s()
            try:
                await ref.call(RoleControl.drain, reason, deadline_s=deadline_s)
            except MeshError as error:  # it ends all the same: ledgers have all its work
                self._mesh.telemetry.log.warning("drain failed", role=self.name, error=str(error))
        with suppress(NotFound):  # it could not be started
            await self.supervisor.remove(self.name, WORKER_STOP_S if worker_stops else GRACE_S)
        self._context.budgets.record_exit(self.name)
        self._enter_phase(InstancePhase.GONE, "")

    async def _read_leave_s(self) -> float:
        mesh = self._mesh
        try:
            notice = await read_notice(mesh.state, mesh.settings.host)
        except (StateUnavailable, DeadlineExceeded):
            return 0.0
        return compute_leave_s(notice.preempt_at_s, mesh.clock.wall())

    async def kill(self, deadline_s: float) -> None:
        """Kill the process with SIGKILL, and return when it is dead; the supervisor restarts it.

        Raises DeadlineExceeded if it still exists after `deadline_s` seconds.
        """
        if (child := self.supervisor.children.get(self.name)) is not None:
            child.kill()
            if await child.wait(deadline_s) is None:
                raise DeadlineExceeded(
                    f"{self.name} has not exited within {deadline_s:g} s of SIGKILL"
                )

    async def poll(self) -> None:
        """Check if the process is ready, and start to move a ready one to the desired tier.

        A start without progress for NO_PROGRESS_TIMEOUT_S is killed. A failed process is started
        again after a pause.
        """
        if self._is_down:
            if self._now() >= self._retry_at:
                with suppress(NotFound):
                    await self.supervisor.remove(self.name, 0.0)
                await self.start()
        elif not self.is_ready:
            before = self._startup.progress
            startup_state = await self._startup.poll(self.pid)
            if self._startup.progress not in (None, before):
                self._context.room.extend_reservation(self.name)
            self.is_ready = startup_state == StartupState.READY
            if startup_state == StartupState.TIMED_OUT and self.name in self.supervisor.children:
                detail = f"killed: not ready, and no progress for {NO_PROGRESS_TIMEOUT_S:g} s"
                self._enter_phase(InstancePhase.STARTING, detail)
                self._timed_out_pid = self.pid
                self.supervisor.children[self.name].kill()
        may_move = self.is_ready and self._tier_task is None and self._now() >= self._retry_at
        if may_move and self._reached != self._target:
            self._tier_task = asyncio.create_task(self._set_tier(), name=f"set tier of {self.name}")

    # Moves between tiers

    @property
    def _target(self) -> tuple[Tier, bool, int]:
        """Desired tier, time slicing and epoch."""
        instance = self.desired.instance
        return instance.tier, self.is_time_sliced, instance.epoch

    async def _set_tier(self) -> None:
        """Send the desired tier to the process, and notify the worker of the result."""
        target, budgets = self._target, self._context.budgets
        tier, time_sliced, epoch = target
        try:
            if tier != self.tier:
                if self._reached is not None:
                    await self._wait_for_wake_room(target)
                # The kinds of one that starts are there, and can leave once it has its targets.
                if self._reached is not None or not time_sliced or tier != Tier.ACCELERATOR:
                    budgets.claim(self.name, tier)
                if self._reached is not None:  # it sleeps; a process that starts was checked before
                    await self._check_gpu_memory()
                is_reported = self.phase == InstancePhase.MOVING and self._reported_rejection
                if self._reached is not None and not is_reported:
                    self._enter_phase(InstancePhase.MOVING, f"from {self.tier} to {tier}")
                    self._on_change()
            files = self._mesh.settings.make_offload_directory(self._mesh.name)
            request = SetTier(tier, epoch, time_sliced, self._mesh.name, files)
            self.is_moving = tier != self.tier
            answer = await self._mesh.ref(self.name).call(RoleControl.set_tier, request)
            usage = TierBytes(answer.accelerator_bytes, answer.memory_bytes, answer.disk_bytes)
            self.tier, self._reached, self._takes_slices = tier, target, time_sliced
            self._failing_since = None
            budgets.record_usage(self.name, usage, can_move=time_sliced)
            self._enter_phase(InstancePhase.READY, "")
        except MeshError as error:
            await self._handle_set_tier_error(error, target)
        finally:
            self.is_moving = False
            self._context.room.cancel_reservation(self.name)
            budgets.cancel_claim(self.name)
            self._tier_task = None
            self._on_change()

    async def _wait_for_wake_room(self, target: tuple[Tier, bool, int]) -> None:
        """Wait until others have left the room of a process that wakes.

        Raises Fenced if another state is desired by then, or the process has exited.
        """
        while awaited := await self._reserve_room():
            if self.detail != awaited:
                self._enter_phase(InstancePhase.MOVING, awaited)
                self._on_change()
            await self._mesh.clock.sleep(ROOM_POLL_S)
            if self._target != target or self._reached is None:
                raise Fenced("the state has changed while it waited for room", where=self.name)

    async def _handle_set_tier_error(
        self, error: MeshError, target: tuple[Tier, bool, int]
    ) -> None:
        """Keep the process at its tier after a failed move, and set when to retry.

        A process that has turned out to be larger than the accelerator is ended, as others compute
        there.
        """
        is_over_budget, now = isinstance(error, OverBudget), self._now()
        if isinstance(error, OverBudget) and error.already_used:
            self._enter_phase(InstancePhase.DRAINING, str(error))
            with suppress(NotFound):
                await self.supervisor.remove(self.name, GRACE_S)
            self._is_down = True
        elif self._target != target:  # a later desired state is on record, and is tried at once
            return
        elif is_over_budget and target[0] == Tier.ACCELERATOR and (awaited := self._list_awaited()):
            phase = InstancePhase.STARTING if self._reached is None else InstancePhase.MOVING
            self._report_rejection(phase, error, awaited)
            self._retry_at = now + (SET_TIER_RETRY_S if any(awaited.values()) else MEMORY_RETRY_S)
            return
        retry_s = SET_TIER_RETRY_S  # busy, starting, or a later desired state is on record
        if isinstance(error, StorageFull):
            self._report_rejection(InstancePhase.FAILED, error)
            retry_s = MEMORY_RETRY_S if is_over_budget else TRY_AGAIN_S
        elif self.is_ready and self._is_persistent(error, now):
            self._report_rejection(InstancePhase.FAILED, error)
            retry_s = TRY_AGAIN_S
        elif self.is_ready and not isinstance(error, Fenced):
            self._report_rejection(self.phase, error)
        self._retry_at = self._now() + retry_s

    def _is_persistent(self, error: MeshError, now: float) -> bool:
        """Return True once errors that waiting cannot remove last SET_TIER_ERROR_TOLERANCE_S."""
        if error.retryable or isinstance(error, Fenced | Refused):
            return False
        if self._failing_since is None:
            self._failing_since = now
        return now - self._failing_since >= SET_TIER_ERROR_TOLERANCE_S

    # Exit

    def _now(self) -> float:
        return self._mesh.clock.monotonic()

    def _enter_phase(self, phase: InstancePhase, detail: str) -> None:
        """Set phase and detail for the next report, and restart the timer of the start."""
        self.phase, self.detail, self._reported_rejection = phase, detail, None
        self._startup.restart_timer()

    def _report_rejection(
        self, phase: InstancePhase, error: MeshError, awaited: Collection[str] = ()
    ) -> None:
        """Report a rejection with the `awaited` processes, unless only its numbers have changed."""
        if self._reported_rejection != (phase, type(error), awaited):
            wait = f"waiting until {', '.join(awaited)} can leave: " if awaited else ""
            self._enter_phase(phase, f"{wait}{error}")
            self._reported_rejection = (phase, type(error), awaited)

    # Supervisor hooks

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        """Reset the process's state and free its name and bytes; report an unrequested exit."""
        self.is_ready, self._reached, self.tier = False, None, Tier.ABSENT
        self._failing_since = None
        self._succeeded = not child_exit.is_requested and child_exit.code == 0
        self._context.budgets.record_exit(self.name)
        self._on_instance_exit(self.process_key[0])
        await self._leases.evict(child)
        with suppress(DeadlineExceeded, OSError):  # the next process of the name replaces them
            await self._delete_unrecorded_copies()
        self._has_exit_error = child_exit.failure is not None
        if self.phase not in (InstancePhase.DRAINING, InstancePhase.GONE):
            self.restarts += 1
            self._enter_phase(
                InstancePhase.STARTING, f"{child.name} exited: {child_exit.description}"
            )
            self._on_change()
            if not child_exit.is_requested:
                has_timed_out = child.pid == self._timed_out_pid
                await self._report_exit(
                    replace(child_exit, failure=STARTUP_TIMEOUT) if has_timed_out else child_exit
                )
                await self._wait_for_room()
                self.supervisor.replace_spec(self._make_spec())  # and starts it again
        elif not child_exit.is_requested:  # while it is drained: no room is reserved for another
            self._is_down = True
            with suppress(NotFound):
                await self.supervisor.remove(self.name, 0.0)

    async def _delete_unrecorded_copies(self) -> None:
        """Delete the copies of kinds of which no record exists: no later process can use them."""
        context, mesh = self._context, self._mesh
        file = make_offload_path(mesh.settings.make_offload_directory(mesh.name), self.name)
        usage = context.budgets.get_usage(self.name)
        memory_bytes, disk_bytes = usage.memory, usage.disk
        if not context.segments.find(make_segment_key(self.name)).path:
            context.segments.delete_process(self.name)
            memory_bytes = 0
        if disk_bytes and not await mesh.host.run_blocking(
            _keep_recorded, file, deadline_s=DELETE_TIMEOUT_S
        ):
            disk_bytes = 0
        context.budgets.record_usage(self.name, TierBytes(memory=memory_bytes, disk=disk_bytes))

    async def _wait_for_room(self) -> None:
        """Wait for room for a restart; report why there is none after RESTART_ROOM_TIMEOUT_S.

        A process that started without room would take that of others.
        """
        failed_at = self._now() + RESTART_ROOM_TIMEOUT_S
        while True:
            pause_s = ROOM_POLL_S
            try:
                if not await self._reserve_room():
                    break
            except MeshError as error:  # others have reserved it, or Redis does not answer
                awaited = self._list_awaited()
                is_late = self._now() > failed_at and not awaited
                phase = InstancePhase.FAILED if is_late else InstancePhase.STARTING
                self._report_rejection(phase, error, awaited)
                self._on_change()
                pause_s = SET_TIER_RETRY_S
            await self._mesh.clock.sleep(pause_s)
        if self.phase == InstancePhase.FAILED:
            self._enter_phase(InstancePhase.STARTING, "")

    async def _report_exit(self, child_exit: ChildExit) -> None:
        """Report an exit to Redis, which fails the job if a restart cannot help or the error
        recurs.
        """
        job, log = self.desired.instance.job, str(self._log_path)
        about = self.name, child_exit.code, child_exit.why, child_exit.failure
        report = ExitReport(*about, job, child_exit.final, log=log)
        await self._exit_reports.report(replace(report, run_time_s=child_exit.run_time_s))

    def has_lease_expired(self, child: ChildProcess) -> bool:
        """Return True if the process's lease expired long ago; the supervisor then kills the
        process.
        """
        return self._leases.has_expired(child)

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        """Plan a later start: after a clean exit, or when the restart budget is used up."""
        self._is_down = True
        if self._succeeded:  # its job has ended, or continues with another process
            self._enter_phase(
                InstancePhase.STARTING, f"{spec.name} has exited and will be restarted"
            )
            self._retry_at = self._now() + RESTART_AFTER_SUCCESS_S
        else:
            log_end = "" if self._has_exit_error else f" ends: {read_log_end(spec.log)}"
            self._enter_phase(
                InstancePhase.FAILED, f"{spec.name}: {why}; its log {spec.log}{log_end}"
            )
            self._retry_at = self._now() + TRY_AGAIN_S
        self._on_change()


def remove_with_parts(file: Path) -> None:
    """Delete a file, with its parts of the same prefix."""
    for path in file.parent.glob(f"{file.name}*"):  # complete or partial
        path.unlink(missing_ok=True)


def _keep_recorded(file: Path) -> bool:
    """Return True if a record exists; else delete the copies without one."""
    is_recorded = file.exists()
    if not is_recorded:
        remove_with_parts(file)
    return is_recorded


def compute_leave_s(end_s: float | None, now_s: float) -> float:
    """Return the seconds in which a process's work may leave a host that ends at `end_s`.

    UNKNOWN_TIME: at an unknown time; None: its end is not announced.
    """
    if end_s is None:
        return 0.0
    left_s = UNKNOWN_END_S if end_s == UNKNOWN_TIME else end_s - now_s
    return min(MAX_LEAVE_S, max(0.0, left_s - DRAIN_S - GRACE_S))
