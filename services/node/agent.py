"""Agent of a host: starts and watches one worker for each accelerator, and the host's services.

The services are the shards and sandboxes that the planner places on this host. All of these
processes run in sessions of their own and survive the agent. The next incarnation adopts them by
the pids and start times in its pid file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api import node as api
from meshrl.common.api.calls.interface import ChangeHint
from meshrl.common.api.node import LogFile, LogPart, Node, ReadLog
from meshrl.common.api.stats import HeadLatencyStats, HostLoadStats, NodeStats
from meshrl.common.base.errors import DeadlineExceeded, NotFound, StateUnavailable
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import Stoppable
from meshrl.common.mesh.process.output.log_bounds import rotate_file_if_long
from meshrl.common.mesh.process.supervision.exit_reports import ExitReport, ExitReportSender
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import (
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.common.mesh.runtime.calls.actor import Actor, call, cast
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events
from meshrl.common.state.pool.scheduling.host_services import ALL_SERVICES
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.redis.client import read_server_time_ms
from meshrl.services.node import old_runs
from meshrl.services.node.gpus.accelerators import WorkerAccelerator
from meshrl.services.node.gpus.watch import GpuWatch
from meshrl.services.node.host_isolation import HostIsolation
from meshrl.services.node.job_services import JobServices
from meshrl.services.node.pid_file import PidFile

MAX_READ_BYTES = 1 << 20  # most bytes of one part, whatever the request
LOG_SUFFIX = ".log"


class HostLogFiles:
    """Log files in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def list_files(self) -> list[LogFile]:
        """List the logs with their sizes in bytes and modification times, without rotated parts."""
        files = []
        for path in sorted(self._directory.glob(f"*{LOG_SUFFIX}")):
            status = path.stat()
            files.append(LogFile(path.stem, status.st_size, status.st_mtime))
        return files

    def read(self, name: str, offset: int, max_bytes: int) -> LogPart:
        """Return a part of a log file as text, and the offset where the next part starts.

        A part from a non-negative offset ends at its last line end, if it contains any.

        Args:
            offset: First byte; below 0, that many bytes before the end of the file.
            max_bytes: Most bytes of the part; larger values are lowered to MAX_READ_BYTES.

        Raises:
            NotFound: There is no such file.
        """
        if name not in (file.name for file in self.list_files()):
            raise NotFound(f"this host has no log {name!r:.200}")
        with (self._directory / (name + LOG_SUFFIX)).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            file.seek(start)
            content = file.read(max(0, min(max_bytes, MAX_READ_BYTES)))
        part = content if offset < 0 else content[: content.rfind(b"\n") + 1] or content
        return LogPart(part.decode(errors="replace"), start + len(part), size)

    def rotate_oversized(self) -> None:
        """Rotate logs above 16 MiB, whichever process writes to them; one previous part stays."""
        for path in self._directory.glob(f"*{LOG_SUFFIX}"):
            rotate_file_if_long(path)


LOAD_POLL_S = 1.0
WINDOW_S = 5.0  # window of the mean `busy_cores`
LATENCY_POLL_S = 10.0
LATENCY_TIMEOUT_S = 5.0
LATENCY_SAMPLES = 3  # the shortest of so many round trips is the most accurate


class HostLoadSampler:
    """Load statistics of the host at the last sample; `busy_cores` needs two samples."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        """Create a sampler; `directory` is on the disk whose free space is reported."""
        self._mesh, self._directory = mesh, directory
        self._samples: deque[tuple[float, float]] = deque()  # time, busy seconds until then
        self.stats = HostLoadStats()

    async def run(self) -> None:
        """Sample every LOAD_POLL_S seconds until cancelled."""
        while True:
            self.sample()
            await self._mesh.clock.sleep(LOAD_POLL_S)

    def sample(self) -> None:
        """Update `stats`; `busy_cores` is the mean of the last WINDOW_S seconds."""
        now, (processors, busy_s) = (
            self._mesh.clock.monotonic(),
            self._mesh.host.measure_processors(),
        )
        self._samples.append((now, busy_s))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        window_start, earlier_busy_s = self._samples[0]
        free_space = self._mesh.host.measure_free_space(self._directory)
        self.stats = HostLoadStats(free_space.memory_bytes, free_space.disk_bytes)
        if processors and now > window_start:
            busy_cores = (busy_s - earlier_busy_s) / (now - window_start)
            self.stats = replace(
                self.stats, cores=processors, busy_cores=round(min(busy_cores, processors), 2)
            )


class HeadLatencySampler:
    """Round-trip time to the head and clock offset at the last sample; empty without a reply."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.stats = HeadLatencyStats()

    async def run(self) -> None:
        """Measure every LATENCY_POLL_S seconds until cancelled; without a reply the figures are
        empty.
        """
        while True:
            try:
                async with self._mesh.clock.timeout(
                    LATENCY_TIMEOUT_S, "measuring the latency to the head"
                ):
                    trip_ms, ahead_ms = min([await self._measure() for _ in range(LATENCY_SAMPLES)])
                self.stats = HeadLatencyStats(round(trip_ms, 2), round(ahead_ms, 1))
            except (StateUnavailable, DeadlineExceeded):
                self.stats = HeadLatencyStats()
            await self._mesh.clock.sleep(LATENCY_POLL_S)

    async def _measure(self) -> tuple[float, float]:
        """Return the round-trip time and how far this host's clock is ahead, both in milliseconds.

        The offset assumes that Redis reads its clock in the middle of the round trip.
        """
        clock = self._mesh.clock
        sent_at = clock.monotonic()
        server_time_ms = await read_server_time_ms(self._mesh.state)
        trip_ms = 1000 * (clock.monotonic() - sent_at)
        return trip_ms, 1000 * clock.wall() - trip_ms / 2 - server_time_ms


T = TypeVar("T")
RESTART_BUDGET = (
    20,
    120.0,
)  # restarts of a worker in seconds: spot hosts see faults every few seconds
TRY_AGAIN_S = 60.0  # after the restart budget is exhausted
GRACE_S = 6.0  # for a worker to end its role processes and itself
LOG_READ_TIMEOUT_S = 8.0  # to read a part of a log file
LOG_TRUNCATE_INTERVAL_S = 1.0  # between two checks of the logs' length
EVENT_TIMEOUT_S = 2.0  # a report must not delay a restart


def worker_command_words(name: str) -> list[str]:
    """Return the words that identify the command line of the worker with this registry name."""
    return ["meshrl.services.node.worker", "--worker", name.partition("/")[2]]


class NodeAgent(Actor, SupervisorHooks):
    """Actor of a host's agent, which supervises the host's workers and services."""

    interface = Node

    def __init__(
        self,
        mesh: Mesh,
        accelerators: list[WorkerAccelerator],
        worker_options: list[str],
        worker_prefix: str,
        service_options: Sequence[str] = (),
        accepted_services: Sequence[str] = ALL_SERVICES,
    ) -> None:
        """Worker names are `worker_prefix` and a number, which is unique to this host in the mesh.

        `accepted_services`: services that the planner may place here.
        """
        self._accepted_services = list(accepted_services)
        self._mesh, self._accelerators, self._prefix = mesh, accelerators, worker_prefix
        self._options = worker_options
        self._root = Path(mesh.settings.run_root) / "mesh"
        self._pid_file = PidFile(
            mesh, self._root / f"{mesh.name.replace('/', '-')}.json", worker_command_words
        )
        self._log_files = HostLogFiles(self._root / "logs")
        self._adopted: set[str] = set()
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self._exit_reports = ExitReportSender(mesh.state, mesh.clock)
        self.leases = LeaseWatch(mesh.state, mesh.clock, mesh.settings.host, self._children)
        self.services = JobServices(mesh, self._root, self.leases, service_options)
        self._latency = HeadLatencySampler(mesh)
        self._load = HostLoadSampler(mesh, self._root)
        self._host_isolation = HostIsolation(mesh, accepted_services)
        self.gpus = GpuWatch(
            mesh,
            {
                f"{worker_prefix}{i}": a.device
                for i, a in enumerate(accelerators)
                if a.device is not None
            },
            self._append_event,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._log_truncation: Stoppable | None = None

    def stats(self) -> NodeStats:
        load, latency = self._load.stats, self._latency.stats
        return NodeStats(
            memory_left_bytes=load.memory_left_bytes,
            disk_left_bytes=load.disk_left_bytes,
            cores=load.cores,
            busy_cores=load.busy_cores,
            redis_round_trip_ms=latency.redis_round_trip_ms,
            clock_ahead_ms=latency.clock_ahead_ms,
            workers=len(self._supervisor.children),
            adopted=len(self._adopted),
            services=len(self.services.children),
            adopted_services=self.services.adopted_count,
            accepted_services=self._accepted_services,
            isolation_tiers=self._host_isolation.tiers,
        )

    @cast(Node.notify_change)
    def notify_change(self, m: ChangeHint) -> None:
        """Read the record of this host's services now instead of at the next poll."""
        self.services.notify_change()

    @call(Node.list_logs)
    async def list_logs(self, m: None) -> api.LogFiles:
        return api.LogFiles(await self._run_blocking(self._log_files.list_files))

    @call(Node.read_log)
    async def read_log(self, m: ReadLog) -> LogPart:
        return await self._run_blocking(self._log_files.read, m.name, m.offset, m.max_bytes)

    async def _run_blocking(self, work: Callable[..., T], *args: Any) -> T:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=LOG_READ_TIMEOUT_S)

    async def start(self) -> None:
        """Start the workers and the agent's background tasks; adopt processes that already run."""
        running = await self._pid_file.find_running(["worker"])
        for index, accelerator in enumerate(self._accelerators):
            spec = self._build_child_spec(f"{self._prefix}{index}", accelerator)
            if (adopted := running.get(spec.name)) is not None:
                self._adopted.add(spec.name)
            await self._supervisor.add(spec, adopted=adopted)
        await self.services.adopt_running()
        self._spawn_task(self.leases.run())
        self._spawn_task(self.services.run())
        self._spawn_task(old_runs.sweep_forever(self._mesh))
        self._spawn_task(self._latency.run())
        self._spawn_task(self._load.run())
        self._spawn_task(self._host_isolation.run())
        self._spawn_task(self.gpus.run())
        self._log_truncation = self._mesh.host.run_periodically(
            LOG_TRUNCATE_INTERVAL_S, self._log_files.rotate_oversized, "bound logs"
        )

    async def shut_down(self) -> None:
        """Stop the background tasks and all processes that the agent supervises, and delete the pid
        file.

        Shards stop first, as they use the others. The caller leaves the mesh afterwards. A killed
        agent leaves its processes running.
        """
        # A killed process of the simulator is closed without a loop, so nothing can be awaited.
        asyncio.get_running_loop()
        for task in self._tasks:
            task.cancel()
        if self._log_truncation is not None:
            self._log_truncation.stop()
        self._exit_reports.stop()
        await self.services.stop("rollout")
        await asyncio.gather(self._supervisor.stop(GRACE_S), self.services.stop())
        self._pid_file.remove()

    def _children(self) -> list[ChildProcess]:
        return [*self._supervisor.children.values(), *self.services.children]

    def _build_child_spec(self, worker: str, accelerator: WorkerAccelerator) -> ChildSpec:
        name = worker_name(worker)
        module = [sys.executable, "-m", *worker_command_words(name)]
        accelerator_options = ["--accelerator", accelerator.name]
        if accelerator.device is not None:
            accelerator_options += ["--gpu", accelerator.device.uuid]
        if accelerator.memory_bytes:
            accelerator_options += ["--accelerator-bytes", str(accelerator.memory_bytes)]
        return ChildSpec(
            name,
            [*module, *accelerator_options, *self._options],
            env=accelerator.env,
            log=self._log_path(name),
            budget=RESTART_BUDGET,
            own_session=True,
            die_with_parent=False,
        )

    def _log_path(self, name: str) -> Path:
        return self._root / "logs" / (name.replace("/", "-") + ".log")

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _append_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Append an event, or drop it if Redis does not answer within EVENT_TIMEOUT_S."""
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self._mesh.clock.timeout(EVENT_TIMEOUT_S, "appending an event"):
                await events.append(self._mesh.state, kind, fields)

    # Supervisor hooks

    async def on_start(self, child: ChildProcess) -> None:
        """Write the pid file and append an event."""
        self._pid_file.write(self._supervisor.children.values())
        how = "adopted" if child.name in self._adopted else "started"
        await self._append_event("worker_up", {"name": child.name, "pid": child.pid, "how": how})

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        """Free the worker's registry name, and report an exit that the agent did not request."""
        self._adopted.discard(child.name)
        await self._pid_file.free_name(child, self.leases)
        if not child_exit.is_requested:
            report = ExitReport(
                child.name,
                child_exit.code,
                child_exit.why,
                child_exit.failure,
                final=child_exit.final,
            )
            await self._exit_reports.report(replace(report, log=str(self._log_path(child.name))))

    def has_lease_expired(self, child: ChildProcess) -> bool:
        """Return True if a worker's lease expired long ago, so that it is killed."""
        return self.leases.has_expired(child)

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        """Report a worker that used up its restarts, and start it again after TRY_AGAIN_S."""
        await self._append_event("worker_gave_up", {"name": spec.name, "why": why})
        self._mesh.telemetry.log.error("worker exits repeatedly", name=spec.name, why=why)
        self._spawn_task(self._retry_start(spec))

    async def _retry_start(self, spec: ChildSpec) -> None:
        """Start a child after a pause; repeat while the host lacks processes, memory or disk."""
        await self._supervisor.remove(spec.name, 0.0)
        while True:
            await self._mesh.clock.sleep(TRY_AGAIN_S)
            try:
                await self._supervisor.add(spec)
                return
            except OSError as error:
                why = f"the process cannot be started: {error}"
                await self._append_event("worker_gave_up", {"name": spec.name, "why": why})
