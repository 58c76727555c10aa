"""The process of one generation of a resident: started, watched until it is ready, brought to the
tier that is wished, drained, ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from meshrl.common.api.calls.role import Resting, Settle
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
from meshrl.common.base.host.settings import ACCELERATOR_ENV, DEVICE_ENV, WORKER_ENV
from meshrl.common.hardware.gpus.driver import GpuLost, GpuTrouble, NoDriver
from meshrl.common.hardware.gpus.visible import CUDA
from meshrl.common.mesh.process.ends.failure import Failure, end_of
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import (
    NO_START,
    ChildEnd,
    ChildSpec,
    Hooks,
    Supervisor,
)
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Budget, Doing, Tier
from meshrl.services.node.residents.budgets import Budgets, OverBudget
from meshrl.services.node.residents.roles import RoleWish
from meshrl.services.node.residents.room import GpuFull, GpuRoom
from meshrl.services.node.residents.segments import Segments
from meshrl.services.node.residents.startup import LOADING_S, Progress, Startup

NICE = 5  # below the services: a step may wait, a heartbeat may not
# One thread a process (more are slower when cores are shared); tensors are allocated from a heap
# that is kept, so that a step does not fault the pages of its activations in again.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
# Restarts in seconds: their delays add up to what an error of its own must last until it is the
# job's end (`process_ended.lua`), so that it is told before the budget is spent.
BUDGET = (8, 60.0)
DRAIN_S = 5.0
GRACE_S = 5.0  # from SIGTERM to SIGKILL
LEAVING_S = 1.0  # for both, when the whole worker stops
TRY_AGAIN_S = 30.0  # after the budget was spent
WELL_S = 3.0  # after it has ended well and is wished all the same: its job goes on again
SETTLE_AGAIN_S = 1.0  # a process that would not move now may be about to
ROOM_AGAIN_S = 5.0  # until the next look whether there is room
# An error that another try may not bring again, such as one of a disk or of a peer of the process;
# after that it is told as a failure, so that somebody decides otherwise.
UNSETTLED_S = 30.0
LATE = Failure(
    "NotReady",
    f"it was killed because it got no further for {LOADING_S:g} s while it started",
    fix="Its log has what it did last; a model that loads slowly needs a faster disk",
)


@dataclass(frozen=True)
class Around:
    """What the processes of a worker have in common."""

    mesh: Mesh
    worker: str  # id
    commands: dict[str, list[str]]
    logs: Path
    budgets: Budgets
    segments: Segments
    gpu: GpuRoom
    accelerator: str = "cpu:0"  # the worker's, by name

    def log(self, name: str) -> Path:
        return self.logs / (name.replace("/", "-") + ".log")


class RoleProcess(Hooks):
    """At most one process at a time."""

    def __init__(
        self,
        around: Around,
        wish: RoleWish,
        leases: LeaseWatch,
        changed: Callable[[], None],
        gone: Callable[[str], None] = lambda resident: None,
        others_leave: Callable[[], bool] = lambda: False,
        beside: Callable[[], Mapping[int, str]] = dict,
        gpus: Sequence[str] = (),
    ) -> None:
        """`changed` is called when there is news of it, `gone` when a process has ended, whoever
        ended it. `others_leave` says whether the accelerator will have more room by itself,
        `beside` which processes the worker has, by pid. `gpus` are the UUIDs of those that the
        process is to see; none: its worker's.
        """
        self._gpus = {CUDA: ",".join(gpus)} if gpus else {}
        self.wish = wish  # of this process; its tier and epoch may change
        self.name, self.process = wish.name, wish.process
        self.doing, self.detail = Doing.STARTING, ""
        self.tier = Tier.ABSENT  # where its tensors are
        self.restarts = 0
        self.supervisor = Supervisor(around.mesh.host, around.mesh.clock, hooks=self)
        self._around, self._mesh = around, around.mesh
        self._leases, self._changed, self._gone = leases, changed, gone
        self._others_leave, self._beside = others_leave, beside
        self._reports = Reports(self._mesh.state, self._mesh.clock)
        self._log = around.log(self.name)
        self._explained = False  # its last end has an error that says why
        self._startup = Startup(self._mesh, wish)
        self._late = 0  # pid of the process that was killed for it
        self.up = False  # it has said that it is ready
        self._settled: tuple[Tier, bool, int] | None = None  # tier, turns, epoch
        self._settling: asyncio.Task[None] | None = None
        self._not_before = 0.0  # when what was refused, or has failed, is tried again
        self._refusal: tuple[Doing, type[MeshError]] | None = None  # that is on record
        self._down = False  # it has failed: nothing starts it again but a look
        self._well = False  # it has ended last without an error
        self._trouble_since: float | None = None  # since when errors keep it from its tier

    @property
    def children(self) -> list[Child]:
        return list(self.supervisor.children.values())

    @property
    def pid(self) -> int:
        """0: none runs."""
        return next((child.pid for child in self.children), 0)

    @property
    def may_end(self) -> bool:
        """Whether nothing would be lost with it that a checkpoint does not have."""
        absent = self._settled is not None and self._settled[0] == Tier.ABSENT
        return absent or not self.up

    def want(self, wish: RoleWish) -> None:
        """What the record says now. What was refused or has failed under an earlier wish tells
        nothing about a new one, which is tried at once.
        """
        before, self.wish = self._wanted, wish
        if self._wanted == before:
            return
        self._not_before, self._trouble_since = 0.0, None
        if self.doing == Doing.FAILED:
            moves = self._settled is not None
            doing = Doing.MOVING if moves else Doing.STARTING
            self._enter(doing, f"{self.tier} to {wish.resident.tier}" if moves else "")

    async def start(self) -> None:
        """Begins it. What this host cannot start now, or never, is told as a failure."""
        self._down = False
        try:
            self._around.budgets.check_start(self.name)
            await self._check_gpu()
            self._enter(Doing.STARTING, "")
            spec = ChildSpec(
                self.name,
                self.wish.argv(self._around.commands),
                env={
                    **ENVIRONMENT,
                    **self._gpus,
                    WORKER_ENV: self._mesh.name,
                    DEVICE_ENV: self._around.accelerator.partition(":")[0],
                    ACCELERATOR_ENV: self._around.accelerator,
                },
                log=self._log,
                restart="on_failure",
                budget=BUDGET,
                nice=NICE + self._mesh.settings.nice,
            )
            await self.supervisor.add(spec)
        except OverBudget as error:  # others are about to give some back, or the planner errs
            self._down = True
            if self._others_leave():
                self._refused(Doing.STARTING, error)
                if isinstance(error, GpuFull):  # asking the driver takes longer than a sum
                    self._not_before = self._now() + SETTLE_AGAIN_S
                return
            self._refused(Doing.FAILED, error)
            self._not_before = self._now() + ROOM_AGAIN_S
        except (DeadlineExceeded, StateUnavailable, GpuLost, GpuTrouble, NoDriver) as error:
            self._down = True  # nobody could say whether there is room
            away = isinstance(error, StateUnavailable)
            self._refused(Doing.STARTING if away else Doing.FAILED, error)
            self._not_before = self._now() + ROOM_AGAIN_S
        except (OSError, ConfigError) as error:  # no process, memory or log to be had now
            self._down = True
            failure = Failure.of(error)
            self._enter(Doing.FAILED, f"{self.name} cannot be started: {failure}")
            self._not_before = self._now() + TRY_AGAIN_S
            end = ChildEnd(NO_START, "it cannot be started", failure, final=failure.fatal)
            await self._report(end)

    async def _check_gpu(self) -> None:
        """GpuFull where other programs have the memory that it is about to take."""
        resident, around = self.wish.resident, self._around
        if resident.tier == Tier.ACCELERATOR:
            before = around.budgets.largest(self.name)
            await around.gpu.check(resident, self.name, before, self._beside())

    async def stop(self, reason: str, *, leaving: bool = False) -> None:
        """Asks it to drain, then ends it. A process that is not up yet has nothing to drain."""
        if leaving:
            self._reports.stop()
        up, self.up = self.up, False
        self._enter(Doing.DRAINING, reason)
        if (settling := self._settling) is not None:
            settling.cancel()
            await asyncio.wait([settling])
        if up and self.name in self.supervisor.children:
            ref, deadline_s = self._mesh.ref(self.name), LEAVING_S if leaving else DRAIN_S
            try:
                await ref.call(Resting.drain, reason, deadline_s=deadline_s)
            except MeshError as error:  # it ends all the same: its owners' ledgers have all it had
                self._mesh.telemetry.log.warning("drain failed", role=self.name, error=str(error))
        with suppress(NotFound):  # it could not be started
            await self.supervisor.remove(self.name, LEAVING_S if leaving else GRACE_S)
        self._around.budgets.ended(self.name)
        self._enter(Doing.GONE, "")

    async def kill(self, deadline_s: float) -> None:
        """Ends it at once; it is started again. Returns when it is dead, DeadlineExceeded."""
        if (child := self.supervisor.children.get(self.name)) is not None:
            child.kill()
            if await child.wait(deadline_s) is None:
                raise DeadlineExceeded(f"{self.name} has not ended by SIGKILL in {deadline_s:g} s")

    async def look(self) -> None:
        """Moves on: ready when its registry entry says so, then to the tier that is wished; once
        more after a pause when it has failed.
        """
        if self._down:
            if self._now() >= self._not_before:
                with suppress(NotFound):
                    await self.supervisor.remove(self.name, 0.0)
                await self.start()
        elif not self.up:
            found = await self._startup.look(self.pid)
            self.up = found == Progress.READY
            if found == Progress.LATE and self.name in self.supervisor.children:
                late = f"not ready, and no further for {LOADING_S:g} s: killed"
                self._enter(Doing.STARTING, late)
                self._late = self.pid
                self.supervisor.children[self.name].kill()
        may_move = self.up and self._settling is None and self._now() >= self._not_before
        if may_move and self._settled != self._wanted:
            self._settling = asyncio.create_task(self._settle(), name=f"settle {self.name}")

    # From tier to tier

    @property
    def _wanted(self) -> tuple[Tier, bool, int]:
        resident = self.wish.resident
        return resident.tier, resident.turns, resident.epoch

    async def _settle(self) -> None:
        """Asks it to do what is wished; what comes of it is news to the worker."""
        wanted, budgets = self._wanted, self._around.budgets
        tier, turns, epoch = wanted
        try:
            if tier != self.tier:
                budgets.claim(self.name, tier)
                if self._settled is not None:  # it sleeps; what starts was looked at before
                    await self._check_gpu()
                if self._settled is not None and self.doing != Doing.MOVING:
                    self._enter(Doing.MOVING, f"{self.tier} to {tier}")
                    self._changed()
            files = self._mesh.settings.kept_directory(self._mesh.name)
            ask = Settle(tier, epoch, turns, self._mesh.name, files)
            answer = await self._mesh.ref(self.name).call(Resting.settle, ask)
            held = Budget(answer.accelerator, answer.memory, answer.disk)
            self.tier, self._settled = tier, wanted
            self._trouble_since = None
            budgets.settled(self.name, held)
            self._enter(Doing.READY, "")
        except MeshError as error:
            await self._not_settled(error, wanted)
        finally:
            budgets.unclaimed(self.name)
            self._settling = None
            self._changed()

    async def _not_settled(self, error: MeshError, wanted: tuple[Tier, bool, int]) -> None:
        """It stays where it was, and is asked again. One that has turned out to be larger than the
        accelerator ends: others compute there.
        """
        over, now = isinstance(error, OverBudget), self._now()
        if isinstance(error, OverBudget) and error.held:
            self._enter(Doing.DRAINING, str(error))
            with suppress(NotFound):
                await self.supervisor.remove(self.name, GRACE_S)
            self._down = True
        elif self._wanted != wanted:  # a later wish has come meanwhile, and is tried at once
            return
        elif over and wanted[0] == Tier.ACCELERATOR and self._others_leave():
            self._refused(Doing.STARTING if self._settled is None else Doing.MOVING, error)
            self._not_before = now + SETTLE_AGAIN_S
            return
        again_s = SETTLE_AGAIN_S  # it was busy, is being started, or a later wish is on record
        if isinstance(error, StorageFull):
            self._refused(Doing.FAILED, error)
            again_s = ROOM_AGAIN_S if over else TRY_AGAIN_S
        elif self.up and self._is_lasting(error, now):
            self._refused(Doing.FAILED, error)
            again_s = TRY_AGAIN_S
        elif self.up and not isinstance(error, Fenced):
            self._refused(self.doing, error)
        self._not_before = self._now() + again_s

    def _is_lasting(self, error: MeshError, now: float) -> bool:
        """Whether errors that no waiting explains have kept it from where it should be for long."""
        if error.retryable or isinstance(error, Fenced | Refused):
            return False
        if self._trouble_since is None:
            self._trouble_since = now
        return now - self._trouble_since >= UNSETTLED_S

    # Its end

    def _now(self) -> float:
        return self._mesh.clock.monotonic()

    def _enter(self, doing: Doing, detail: str) -> None:
        self.doing, self.detail, self._refusal = doing, detail, None
        self._startup.begin()

    def _refused(self, doing: Doing, error: MeshError) -> None:
        """The same again is no news, though its numbers have changed."""
        if self._refusal != (doing, type(error)):
            self._enter(doing, str(error))
            self._refusal = (doing, type(error))

    # What the supervisor tells

    async def ended(self, child: Child, end: ChildEnd) -> None:
        await self._leases.evict(child)
        self.up, self._settled, self.tier = False, None, Tier.ABSENT
        self._trouble_since = None
        self._well = not end.asked and end.code == 0
        self._around.budgets.ended(self.name)
        self._gone(self.process[0])
        self._explained = end.failure is not None
        if self.doing not in (Doing.DRAINING, Doing.GONE):
            self.restarts += 1
            self._enter(Doing.STARTING, f"{child.name} ended: {end.told}")
            self._changed()
            if not end.asked:
                late = child.pid == self._late
                await self._report(replace(end, failure=LATE) if late else end)

    async def _report(self, end: ChildEnd) -> None:
        """An error that no restart mends ends the job, and so does any that comes for ever."""
        job, log = self.wish.resident.job, str(self._log)
        report = EndReport(self.name, end.code, end.why, end.failure, job, end.final, log=log)
        await self._reports.tell(replace(report, ran_s=end.ran_s))

    def lease_expired(self, child: Child) -> bool:
        return self._leases.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        self._down = True
        if self._well:  # its job has ended, or goes on with another process
            self._enter(Doing.STARTING, f"{spec.name} has ended, and is started again")
            self._not_before = self._now() + WELL_S
        else:
            said = "" if self._explained else f" ends: {end_of(spec.log)}"
            self._enter(Doing.FAILED, f"{spec.name}: {why}; its log {spec.log}{said}")
            self._not_before = self._now() + TRY_AGAIN_S
        self._changed()
