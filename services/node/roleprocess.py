"""The role process of a gang: started for an assignment, watched until ready, drained, ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.api.role import Drain, Drainable
from common.errors import MeshError, NotFound
from common.process.failure import Failure, end_of
from common.process.handle import Child
from common.process.lease_watch import LeaseWatch
from common.process.supervisor import NO_START, ChildSpec, End, Hooks, Supervisor
from common.runtime.mesh import Mesh
from common.state import registry
from common.state.ended import Report, Reports
from services.node.roles import Assignment

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
LOADING_S = 300.0  # a started process may be so long on one thing until it is ready
DRAIN_S = 5.0
GRACE_S = 5.0  # from SIGTERM to SIGKILL
LEAVING_S = 1.0  # for both, when the whole worker stops
TRY_AGAIN_S = 30.0  # after the budget was spent, or the process ended by itself
LATE = Failure(
    "NotReady",
    f"it was killed because it got no further for {LOADING_S:g} s while it started",
    fix="Its log has what it did last; a model that loads slowly needs a faster disk",
)


class RoleProcess(Hooks):
    """At most one process. `changed` is set when its supervisor has news of it."""

    def __init__(self, mesh: Mesh, gang: str, commands: dict[str, list[str]], logs: Path) -> None:
        self.assignment: Assignment | None = None
        self.state = "idle"
        self.restarts = 0
        self.changed = asyncio.Event()
        self._mesh, self._gang, self._commands, self._logs = mesh, gang, commands, logs
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self._reports = Reports(mesh.state, mesh.clock)
        self._explained = False  # its last end has an error that says why
        self.leases = LeaseWatch(
            mesh.state, mesh.clock, mesh.settings.host, lambda: self._supervisor.children.values()
        )
        self._since = 0.0  # when the state began
        self._progress: Any = None  # what a process that starts has published of it
        self._moved = 0.0  # when it last changed
        self._late = 0  # pid of the process that was killed for it
        self._detail = ""

    @property
    def detail(self) -> str:
        return self._detail

    @property
    def pid(self) -> int:
        return next((child.pid for child in self._supervisor.children.values()), 0)

    async def start(self, assignment: Assignment) -> None:
        self.assignment = assignment
        name = assignment.name(self._gang)
        self._enter("starting", "")
        spec = ChildSpec(
            name,
            assignment.argv(self._gang, self._commands),
            env=ENVIRONMENT,
            log=self._log(name),
            restart="on_failure",
            budget=BUDGET,
            nice=NICE + self._mesh.settings.nice,
        )
        try:
            await self._supervisor.add(spec)
        except OSError as error:  # no process, memory or log to be had now: `look` tries again
            failure = Failure.of(error)
            self._enter("failed", f"{name} cannot be started: {failure}")
            await self._report(name, End(NO_START, "it cannot be started", failure))

    def _log(self, name: str) -> Path:
        return self._logs / (name.replace("/", "-") + ".log")

    async def stop(self, reason: str, *, leaving: bool = False) -> None:
        """Asks it to drain, then ends it. A process that is not up yet has nothing to drain."""
        if leaving:
            self._reports.stop()
        if self.assignment is None:
            return
        name = self.assignment.name(self._gang)
        if self.state == "ready":
            self._enter("draining", reason)
            await self._drain(name, reason, LEAVING_S if leaving else DRAIN_S)
        with suppress(NotFound):  # it could not be started
            await self._supervisor.remove(name, LEAVING_S if leaving else GRACE_S)
        self.assignment = None
        self._enter("idle", "")

    async def look(self) -> None:
        """Moves on: ready when its registry entry says so; once more after a pause when failed.

        A process that starts is killed when it gets no further: a warm start or a replay may take
        hours, and says how far it is as `progress` among its stats.
        """
        assignment, now = self.assignment, self._mesh.clock.monotonic()
        if assignment is None:
            return
        name = assignment.name(self._gang)
        if self.state == "starting":
            entry = await registry.lookup(self._mesh.state, name)
            if entry is not None and self._is_ready(entry, assignment):
                self._enter("ready", "")
            elif entry is not None and self._moves(entry):
                self._progress, self._moved = entry.stats["progress"], now
            elif now - self._moved > LOADING_S and name in self._supervisor.children:
                self._enter("starting", f"not ready, and no further for {LOADING_S:g} s: killed")
                self._late = self._supervisor.children[name].pid
                self._supervisor.children[name].kill()
        elif self.state == "failed" and now - self._since > TRY_AGAIN_S:
            with suppress(NotFound):
                await self._supervisor.remove(name, 0.0)
            await self.start(assignment)

    def _is_ready(self, entry: registry.Entry, assignment: Assignment) -> bool:
        stats: dict[str, Any] = entry.stats
        expected = stats.get("epoch") == assignment.epoch and stats.get("ready") is True
        return expected and self._is_ours(entry)

    def _moves(self, entry: registry.Entry) -> bool:
        progress = entry.stats.get("progress")
        return progress not in (None, self._progress) and self._is_ours(entry)

    def _is_ours(self, entry: registry.Entry) -> bool:
        return (entry.alive, entry.host, entry.pid) == (True, self._mesh.settings.host, self.pid)

    async def _drain(self, name: str, reason: str, deadline_s: float) -> None:
        try:
            await self._mesh.ref(name).call(Drainable.drain, Drain(reason), deadline_s=deadline_s)
        except MeshError as error:
            # It ends all the same: what it had is in its owners' ledgers.
            self._mesh.telemetry.log.warning("drain failed", role=name, error=str(error))

    def _enter(self, state: str, detail: str) -> None:
        self.state, self._detail, self._since = state, detail, self._mesh.clock.monotonic()
        self._progress, self._moved = None, self._since

    # What the supervisor tells

    async def ended(self, child: Child, end: End) -> None:
        await self.leases.evict(child)
        self._explained = end.failure is not None
        if self.state in ("starting", "ready"):
            self.restarts += 1
            self._enter("starting", f"{child.name} ended: {end.told}")
            self.changed.set()
            if not end.asked:
                late = child.pid == self._late
                await self._report(child.name, replace(end, failure=LATE) if late else end)

    async def _report(self, name: str, end: End) -> None:
        """An error that no restart mends ends the job, and so does any that comes for ever."""
        job = self.assignment.job if self.assignment is not None else ""
        log = str(self._log(name))
        report = Report(name, end.code, end.why, end.failure, job, end.final, log=log)
        await self._reports.tell(replace(report, ran_s=end.ran_s))

    def lease_expired(self, child: Child) -> bool:
        return self.leases.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        said = "" if self._explained else f" ends: {end_of(spec.log)}"
        self._enter("failed", f"{spec.name}: {why}; its log {spec.log}{said}")
        self.changed.set()
