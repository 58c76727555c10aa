"""Supervisor of one host's services: it forks, watches, restarts, reports and stops them.

The launcher has those of the head, `host_launcher` those of a joined host. Leases show whether a
service runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.base.host.settings import MESH_TAG_ENV, SETTINGS_ENV, compute_mesh_tag
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis.failure import read_log_end
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.supervision.exit_reports import (
    ExitReport,
    ExitReportSender,
    read_last_exits,
)
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import (
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch import leftover_processes
from meshrl.launch.services import restart_policy, service_plan
from meshrl.launch.services.mesh_fork_server import MeshForkServer
from meshrl.view import disk_full

RESTART_BUDGET = (
    20,
    120.0,
)  # restarts of a service in seconds: faults come every few seconds at worst
READY_TIMEOUT_S = 60.0  # until every service has registered; imports on a busy machine are slow
MAX_START_FAILURES = 3  # times that an error may end a process while its host starts
GRACE_S = 10.0  # from SIGTERM to SIGKILL
STAGE_GRACE_S = (
    20.0  # the same for each stage of the stop: an agent ends shards first, then all else
)
POLL_S = 0.1


class HostServices(SupervisorHooks):
    """Services of a host.

    `failed` is set, with its reason, when a service does not stay up. With `waits_for_head` that
    happens only when no service could run: a host that cannot reach its head waits for it.
    """

    def __init__(
        self, host: Host, clock: Clock, mesh_paths: MeshPaths, *, waits_for_head: bool = False
    ) -> None:
        self._waits_for_head = waits_for_head
        self._host, self._clock, self._mesh_paths = host, clock, mesh_paths
        self.failed = asyncio.Event()
        self.failure_reason = ""
        self.state: StateClient
        self._host_name = ""  # of this host
        self._supervisor: Supervisor | None = None
        self._planned_services: tuple[str, ...] = ()
        self._fork_server = MeshForkServer(
            host, clock, mesh_paths, self.environment, RESTART_BUDGET, self.on_exit
        )
        self._lease_watch: LeaseWatch | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._exit_reports: ExitReportSender | None = None
        self._explained_exits: set[str] = set()  # services whose exits have a reported error

    @property
    def environment(self) -> dict[str, str]:
        """Environment of every process; its mesh tag identifies leftover processes."""
        settings = self._mesh_paths.settings.resolve()
        marks = {SETTINGS_ENV: str(settings), MESH_TAG_ENV: compute_mesh_tag(settings)}
        return {**marks, "OMP_NUM_THREADS": "1"}

    @property
    def fork_environment(self) -> Mapping[str, str]:
        """Variables with which the fork server forks a process."""
        return self._fork_server.environment

    @property
    def is_running(self) -> bool:
        """True while the services are started and not about to end."""
        return self._supervisor is not None

    @property
    def planned_services(self) -> tuple[str, ...]:
        return self._planned_services if self.is_running else ()

    @property
    def down_reason(self) -> str:
        """Names of the services that do not run, as a text; empty if all run."""
        there = self._supervisor.children if self._supervisor is not None else {}
        missing = [name for name in self.planned_services if name not in there]
        return f"{', '.join(missing)} is down" if missing else ""

    @property
    def children(self) -> Iterator[tuple[str, ChildProcess]]:
        for supervisor in (self._fork_server.supervisor, self._supervisor):
            if supervisor is not None:
                yield from supervisor.children.items()

    # -- start and stop ----------------------------------------------------------------------------

    async def prepare(self) -> None:
        """End what an earlier start has left, and start the fork server."""
        await leftover_processes.kill_leftovers(self._mesh_paths.settings.resolve(), GRACE_S)
        await self._fork_server.start()

    def connect_state(self, state: StateClient, host: str) -> None:
        """Report exits to `state` from now on; `host` is this host's name."""
        self.state, self._host_name = state, host
        self._exit_reports = ExitReportSender(state, self._clock)

    async def start(self, services: Sequence[service_plan.ServiceSpec]) -> None:
        """Start the services in their order, once the fork server listens."""
        await self._fork_server.wait_until_listening()
        specs = [
            ChildSpec(
                service.name,
                list(service.argv),
                env=self.environment | self._fork_server.environment,
                log=self._mesh_paths.log_path(service.name),
                budget=RESTART_BUDGET,
                is_critical=True,
                stage=stage,
                own_session=True,  # Ctrl-C reaches only this process, which stops them in order
            )
            for stage, service in enumerate(services)
        ]
        self._planned_services = tuple(service.name for service in services)
        supervisor = self._supervisor = Supervisor(self._host, self._clock, specs, hooks=self)
        watch = self._lease_watch = LeaseWatch(
            self.state, self._clock, self._host_name, lambda: supervisor.children.values()
        )
        await supervisor.start()
        if self._supervisor is supervisor:  # else they were stopped, and others run
            self._lease_task = asyncio.create_task(watch.run(), name="watch leases")

    async def wait_until_registered(self, names: set[str], worker_count: int) -> None:
        """Wait for these services, and for so many workers of this host.

        Raises MeshError with the error that ends one repeatedly, or DeadlineExceeded.
        """
        before = {end.name: end.times for end in await read_last_exits(self.state)}
        until = self._clock.monotonic() + READY_TIMEOUT_S
        while True:
            entries = [e for e in await registry.list_entries(self.state) if e.alive]
            missing = sorted(names - {e.name for e in entries})
            there = sum(e.kind == "worker" and e.host == self._host_name for e in entries)
            if not missing and there >= worker_count:
                return
            if self.failed.is_set():
                raise MeshError(self.failure_reason)
            await self._raise_if_hopeless({e.name for e in entries}, before)
            if self._clock.monotonic() > until:
                absent = ", ".join(missing) or f"{worker_count - there} workers"
                raise DeadlineExceeded(
                    f"{absent} did not start within {READY_TIMEOUT_S:g} s",
                    fix=f"Check the logs in {self._mesh_paths.logs}",
                )
            await self._clock.sleep(POLL_S)

    async def _raise_if_hopeless(self, alive: set[str], before: dict[str, int]) -> None:
        """Raise MeshError with the error of a process that would never start."""
        for end in await read_last_exits(self.state):
            times = end.times - before.get(end.name, 0)
            retries_exhausted = bool(end.error.get("type")) and times >= MAX_START_FAILURES
            ours = end.log == str(self._mesh_paths.log_path(end.name))
            if ours and end.name not in alive and times and (end.final or retries_exhausted):
                raise MeshError(f"{end.name} does not start: {end.description}; its log: {end.log}")

    async def stop(self, *, fork_server: bool = True) -> None:
        """Stop the services in reverse order of the start, and the fork server unless it is still
        needed.
        """
        if (supervisor := self._detach_supervisor()) is not None:
            await supervisor.stop(STAGE_GRACE_S)
        if fork_server:
            await self._fork_server.stop(GRACE_S)

    async def kill(self) -> None:
        """Kill everything of this host at once, also what others have started."""
        if (supervisor := self._detach_supervisor()) is not None:
            for child in supervisor.children.values():
                child.kill()
            await supervisor.stop(GRACE_S)
        await self._fork_server.stop(GRACE_S)
        await leftover_processes.kill_leftovers(self._mesh_paths.settings.resolve(), GRACE_S)

    def kill_now(self) -> None:
        """Kill everything without waiting, for the second Ctrl-C."""
        for _, child in self.children:
            child.kill()
        for pid in leftover_processes.find_leftovers(self._mesh_paths.settings.resolve()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def kill_leftovers(self) -> None:
        """Kill what has not stopped, except a needed fork server, and print it."""
        excluded_pids = [child.pid for child in self._fork_server.supervisor.children.values()]
        if pids := await leftover_processes.kill_leftovers(
            self._mesh_paths.settings.resolve(), GRACE_S, excluded_pids
        ):
            print(f"killed {len(pids)} processes that had not stopped: {pids}", file=sys.stderr)

    def close(self) -> None:
        if self._exit_reports is not None:
            self._exit_reports.stop()

    def fail(self, reason: str) -> None:
        """Mark this host's part of the mesh as failed."""
        self.failure_reason = reason
        self.failed.set()

    def watch_task(self, task: asyncio.Task[Any], description: str) -> None:
        """Fail the host's part of the mesh if a permanent task ends with an error."""

        def report_error(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.fail(f"the task to {description} failed: {type(error).__name__}: {error}")

        task.add_done_callback(report_error)

    def _detach_supervisor(self) -> Supervisor | None:
        supervisor, self._supervisor = self._supervisor, None
        watching, self._lease_task = self._lease_task, None
        if watching is not None:
            watching.cancel()
        return supervisor

    # -- reports of supervisors, also of Redis' -------------------------------------------------

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        if self._supervisor is None:  # the services are about to end
            return
        log = str(self._mesh_paths.log_path(child.name))
        if child_exit.failure is not None:
            self._explained_exits.add(child.name)
        report = ExitReport(
            child.name,
            child_exit.code,
            child_exit.why,
            child_exit.failure,
            final=child_exit.final,
            log=log,
        )
        if child.name == "redis":
            if self._exit_reports is not None:
                self._exit_reports.report_in_background(report)
            return
        if self._lease_watch is not None:
            await self._lease_watch.evict(child)
        if self._exit_reports is not None:
            await self._exit_reports.report(report)

    def has_lease_expired(self, child: ChildProcess) -> bool:
        return (
            self._lease_watch is not None
            and child.name != "redis"
            and self._lease_watch.has_expired(child)
        )

    async def should_reset_budget(self, spec: ChildSpec, child_exit: ChildExit) -> bool:
        """Return True if a service with an exhausted budget may be tried again; see
        `restart_policy`.
        """
        if self._waits_for_head or self._exit_reports is None:
            return self._waits_for_head
        full = disk_full.find_full_disk([self._mesh_paths.root])
        return await restart_policy.should_reset_budget(
            self.state, self._exit_reports, spec, child_exit, full
        )

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        log_end = "" if spec.name in self._explained_exits else f" ends: {read_log_end(spec.log)}"
        self.failure_reason = f"{spec.name} exits repeatedly: {why}; its log {spec.log}{log_end}"

    async def on_critical_loss(self, name: str) -> None:
        self.failed.set()
