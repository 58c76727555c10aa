"""Shards and sandboxes of jobs on one host: exactly those that the planner has placed there.

Each serves one job. Its failure is charged to its job, and affects no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.errors import DeadlineExceeded, MeshError, NotFound, StateUnavailable
from meshrl.common.job.bundle import sandbox_request
from meshrl.common.job.bundle.job_data import MODULES, JobData
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV, FORK_SERVER_OFF
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
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import jobs
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers import process_names
from meshrl.common.weights.store.job_files import (
    fetch_bundle,
    is_on_run_host,
    is_run_host,
    release_bundle,
)
from meshrl.services.node.pid_file import PidFile

ERROR_RETRY_S = 5.0  # after an error
REDIS_RETRY_S = 0.5  # after Redis did not answer
DOCUMENT_POLL_S = 15.0  # between two checks for changed documents
NO_DIGEST = "none"  # no digest: for a sandbox whose job no longer exists


class SandboxCode:
    """Code that sandboxes may load, fetched to a host that does not share the run's directory.

    Sandboxes run code of the model, so they may neither call the weight store nor read a job's row.
    `on_change` is called when code has arrived.
    """

    def __init__(self, mesh: Mesh, on_change: Callable[[], None]) -> None:
        self._mesh, self._on_change = mesh, on_change
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._local_bundles: dict[str, Path | None] = {}  # by sandbox; None: on the run host
        self._load_digests: dict[str, str] = {}  # by sandbox: digest of the code that it may load
        self._last_document_poll = float("-inf")  # for changed documents

    def ensure_local(self, name: str) -> bool:
        """Return True if a sandbox's code is local; otherwise start to fetch it.

        `on_change` is called once it is there. A shard fetches its own code, so the result is True.
        """
        if process_names.parse_service_name(name)[0] != "sandbox" or name in self._local_bundles:
            return True
        if name not in self._fetches:
            self._fetches[name] = asyncio.create_task(
                self._fetch_with_retry(name), name=f"code of {name}"
            )
        return False

    def command_options(self, name: str) -> list[str]:
        """Return the options that name the code which a sandbox may load; none for a shard.

        A joined host can have any shard's key, so a sandbox trusts no shard for the code that it
        imports and runs.
        """
        if process_names.parse_service_name(name)[0] != "sandbox":
            return []
        return ["--load", self._load_digests.get(name, NO_DIGEST)]

    async def record_adopted(self, name: str) -> None:
        """Record, from the job's row in Redis, which code an adopted sandbox may load."""
        if process_names.parse_service_name(name)[0] == "sandbox":
            job = process_names.parse_service_name(name)[1]
            with contextlib.suppress(NotFound):  # no longer desired either
                row = await retry(self._mesh.clock, lambda: jobs.read_job(self._mesh.state, job))
                self._load_digests[name] = _compute_load_digest(row)

    async def find_outdated(self, running: Collection[str]) -> list[str]:
        """Return each running sandbox once after its job's document changes, as on a resume.

        The caller restarts them with the new document. Redis is read at most every DOCUMENT_POLL_S
        seconds; between these reads the result is empty.
        """
        now = self._mesh.clock.monotonic()
        if now < self._last_document_poll + DOCUMENT_POLL_S:
            return []
        digests = {}
        for name in sorted(running):
            if process_names.parse_service_name(name)[0] == "sandbox":
                with contextlib.suppress(NotFound):  # no longer desired either
                    digests[name] = _compute_load_digest(
                        await jobs.read_job(
                            self._mesh.state, process_names.parse_service_name(name)[1]
                        )
                    )
        changed = [
            name for name, digest in digests.items() if self._load_digests.get(name) != digest
        ]
        self._last_document_poll = now
        self._load_digests.update(digests)
        return changed

    def release_others(self, desired: Collection[str]) -> None:
        """Release the code of sandboxes that are no longer desired, and cancel its fetches."""
        for name in self._fetches.keys() - set(desired):
            self._fetches.pop(name).cancel()
        for name in self._load_digests.keys() - set(desired):
            del self._load_digests[name]
        for name in self._local_bundles.keys() - set(desired):
            if (directory := self._local_bundles.pop(name)) is not None:
                release_bundle(directory)

    def stop(self) -> None:
        """Release all code, and cancel all fetches."""
        self.release_others(())

    async def _fetch_with_retry(self, name: str) -> None:
        mesh = self._mesh
        with mesh.wait(f"the code of {name} on this host", on=STORE_NAME):
            while True:
                try:
                    await self._fetch(name)
                    break
                except StateUnavailable:
                    await mesh.clock.sleep(REDIS_RETRY_S)
                except (MeshError, OSError) as error:
                    mesh.telemetry.log.warning("code", name=name, error=str(error))
                    await mesh.clock.sleep(ERROR_RETRY_S)
        self._fetches.pop(name, None)
        self._on_change()

    async def _fetch(self, name: str) -> None:
        mesh, directory = self._mesh, None
        try:
            row = await jobs.read_job(mesh.state, process_names.parse_service_name(name)[1])
        except NotFound:  # soon no longer desired
            self._local_bundles[name] = None
            return
        if not (await is_run_host(mesh) or await is_on_run_host(mesh, Path(row.run_dir))):
            directory = await fetch_bundle(mesh, row, [MODULES])
        self._load_digests[name], self._local_bundles[name] = _compute_load_digest(row), directory


def _compute_load_digest(row: jobs.JobRow) -> str:
    return sandbox_request.compute_request_digest(
        sandbox_request.build_load_request(JobData.from_document(row.id, row.document, row.run_dir))
    )


POLL_S = 1.0  # between two polls of the record; a hint arrives earlier
# As of a role process: restarts in seconds, whose delays add up to the time for which an error of
# its own must last to end the job.
RESTART_BUDGET = (8, 60.0)
TRY_AGAIN_S = 30.0  # after the restart budget is exhausted, or while this host can start nothing
RESTART_AFTER_SUCCESS_S = (
    3.0  # after a clean exit of a process that is still desired: its job has resumed
)
# From SIGTERM to SIGKILL: a shard ends its environments' processes in order, which may take five
# seconds.
GRACE_S = 8.0
KINDS = ("rollout", "sandbox")
# A sandbox runs code of the author and the model: it shares no memory with the fork server.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "rollout": {},
    "sandbox": {FORK_SERVER_ENV: FORK_SERVER_OFF},
}


def service_command(name: str, options: Sequence[str]) -> list[str]:
    """Return the command line of a service: its module, its name and `options`."""
    kind, job, number = process_names.parse_service_name(name)
    module = [sys.executable, "-m", f"meshrl.services.{kind}"]
    identity = ["--name", name] if kind == "sandbox" else ["--job", job, "--shard", str(number)]
    return [*module, *identity, *options]


def service_command_words(name: str) -> list[str]:
    """Return the words that identify the command line of the service with this registry name."""
    return service_command(name, [])[2:]


class JobServices(SupervisorHooks):
    """Supervisor of the shards and sandboxes that the planner places on this host."""

    def __init__(self, mesh: Mesh, root: Path, leases: LeaseWatch, options: Sequence[str]) -> None:
        self._mesh, self._root, self._leases, self._options = mesh, root, leases, options
        self._pid_file = PidFile(
            mesh, root / f"{mesh.name.replace('/', '-')}-services.json", service_command_words
        )
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self._exit_reports = ExitReportSender(mesh.state, mesh.clock)
        self._supervised: set[str] = set()  # supervised processes
        self._not_before: dict[str, float] = {}  # when a failed one is started again
        self._succeeded: set[str] = set()  # those that exited by themselves without an error
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._wakeup = asyncio.Event()
        self._sandbox_code = SandboxCode(mesh, self._wakeup.set)
        self.adopted_count = 0

    @property
    def children(self) -> list[ChildProcess]:
        return list(self._supervisor.children.values())

    def notify_change(self) -> None:
        """Wake the loop: the record has changed."""
        self._wakeup.set()

    async def adopt_running(self) -> None:
        """Adopt processes of an earlier incarnation; the next poll stops undesired ones."""
        for name, child in (await self._pid_file.find_running(KINDS)).items():
            self._supervised.add(name)
            self.adopted_count += 1
            await self._sandbox_code.record_adopted(name)
            spec = self._build_child_spec(name)
            await self._supervisor.add(spec, adopted=child)
            if not self._has_current_code(child, spec.argv):  # its job has another document by now
                self._begin_stop(name)

    async def run(self) -> None:
        """Reconcile with the record until cancelled. A poll that Redis does not answer changes
        nothing.
        """
        mesh = self._mesh
        while True:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._reconcile(await pool.read_host_services(mesh.state, mesh.settings.host))
            with contextlib.suppress(DeadlineExceeded):
                async with mesh.clock.timeout(POLL_S, "waiting for a hint"):
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def stop(self, kind: str = "") -> None:
        """Stop all services, or those of one kind (`rollout`, `sandbox`), concurrently.

        Without a kind, also drop unsent exit reports, release code and delete the pid file.
        """
        if not kind:
            self._exit_reports.stop()
        for name in sorted(self._supervised):
            if process_names.parse_service_name(name)[0] == kind or not kind:
                self._begin_stop(name)
        if tasks := list(self._stopping.values()):
            await asyncio.wait(tasks)
        if not kind:
            self._sandbox_code.stop()
            self._pid_file.remove()

    async def _reconcile(self, desired: tuple[str, ...]) -> None:
        """Stop services that are not desired or have outdated code; start missing ones that are
        due.
        """
        for name in self._supervised - set(desired):
            self._begin_stop(name)
        for name in self._not_before.keys() - set(desired):
            del self._not_before[name]
        self._succeeded &= set(desired)
        self._sandbox_code.release_others(desired)
        for name in await self._sandbox_code.find_outdated(self._supervised):
            self._begin_stop(name)
        for name in desired:
            is_stopped = name not in self._supervised and name not in self._stopping
            is_due = is_stopped and self._mesh.clock.monotonic() >= self._not_before.get(name, 0.0)
            if not is_due or not self._sandbox_code.ensure_local(name):
                continue
            try:
                await self._supervisor.add(self._build_child_spec(name))
                self._supervised.add(name)
            except OSError as error:  # no process, memory or log available now
                self._not_before[name] = self._mesh.clock.monotonic() + TRY_AGAIN_S
                child_exit = ChildExit(
                    START_FAILED_STATUS, "the process cannot be started", Failure.from_error(error)
                )
                await self._report_exit(name, child_exit)

    def _begin_stop(self, name: str) -> None:
        """Stop a service in a separate task, so that a slow exit delays no other service."""
        self._supervised.discard(name)

        def on_done(task: asyncio.Task[None]) -> None:
            self._stopping.pop(name, None)
            if not task.cancelled():
                task.result()
            self._wakeup.set()

        task = asyncio.create_task(self._supervisor.remove(name, GRACE_S), name=f"end {name}")
        self._stopping[name] = task
        task.add_done_callback(on_done)

    def _build_child_spec(self, name: str) -> ChildSpec:
        return ChildSpec(
            name,
            service_command(name, [*self._sandbox_code.command_options(name), *self._options]),
            env=ENVIRONMENT[process_names.parse_service_name(name)[0]],
            log=self._log_path(name),
            restart="on_failure",  # a shard exits with its job
            budget=RESTART_BUDGET,
            own_session=True,
            die_with_parent=False,
        )

    def _has_current_code(self, child: ChildProcess, argv: list[str]) -> bool:
        """Return False if a process is a sandbox that was started with other code options."""
        command_words = argv[2 : len(argv) - len(self._options)]
        process = child.pid, child.start_time
        is_sandbox = process_names.parse_service_name(child.name)[0] == "sandbox"
        return not is_sandbox or bool(
            self._mesh.host.adopt(*process, name=child.name, program=command_words)
        )

    def _log_path(self, name: str) -> Path:
        return self._root / "logs" / (name.replace("/", "-") + ".log")

    # Supervisor hooks

    async def on_start(self, child: ChildProcess) -> None:
        """Write the pid file."""
        self._pid_file.write(self._supervisor.children.values())

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        """Free the service's registry name, and report an exit with an error."""
        await self._pid_file.free_name(child, self._leases)
        if not child_exit.is_requested and child_exit.code:
            self._succeeded.discard(child.name)
            await self._report_exit(child.name, child_exit)
        elif not child_exit.is_requested:  # a shard whose job has ended
            self._succeeded.add(child.name)

    async def _report_exit(self, name: str, child_exit: ChildExit) -> None:
        """Report an exit to Redis, which fails the job if a restart cannot help or the error
        recurs.
        """
        job, log = process_names.parse_service_name(name)[1], str(self._log_path(name))
        report = ExitReport(
            name,
            child_exit.code,
            child_exit.why,
            child_exit.failure,
            job,
            child_exit.final,
            log=log,
        )
        await self._exit_reports.report(replace(report, run_time_s=child_exit.run_time_s))

    def has_lease_expired(self, child: ChildProcess) -> bool:
        """Return True if a service's lease expired long ago, so that it is killed."""
        return self._leases.has_expired(child)

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        """Start a service again later: after a clean exit, or when its restarts are used up.

        The service repeats until the reports of its exits have failed the job.
        """
        pause_s = RESTART_AFTER_SUCCESS_S if spec.name in self._succeeded else TRY_AGAIN_S
        self._mesh.telemetry.log.info(
            "a service does not run", name=spec.name, why=why, for_s=pause_s
        )
        self._not_before[spec.name] = self._mesh.clock.monotonic() + pause_s
        self._begin_stop(spec.name)
