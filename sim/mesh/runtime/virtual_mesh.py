"""Virtual mesh from its start to its end: the services, its jobs, and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, StateUnavailable, StorageFull
from meshrl.common.base.files.json_lines import LineFile
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.supervision.exit_reports import (
    ExitReport,
    ExitReportSender,
    clear_last_exits,
)
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import (
    ChildExit,
    ChildSpec,
    Supervisor,
    SupervisorHooks,
)
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.pool.store.pool_rows import write_settings
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state.rollback import JobWatermark
from meshrl.launch.head.job_restore import restore_job
from meshrl.launch.services import restart_policy, service_plan
from meshrl.launch.services.service_supervisor import GRACE_S, RESTART_BUDGET
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload
from meshrl.sim.mesh.job.job_setup import (
    JOB_NAME,
    MAX_STALENESS,
    build_config,
    list_run_dirs,
    write_job,
)
from meshrl.sim.mesh.runtime.programs import HOST_ID, ProcessContext
from meshrl.sim.mesh.runtime.redis_gate import VirtualRedisGate
from meshrl.sim.mesh.runtime.virtual_redis import VirtualRedis, open_state
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop
from meshrl.sim.virtual_machine import MachineClock, VirtualHost, VirtualMachine
from meshrl.sim.virtual_network import MemoryNetwork
from meshrl.sim.virtual_process import VirtualProcess
from meshrl.view.recording.recorder import POLL_S
from meshrl.view.recording.run_record import EVENTS_FILE, parse_event


class VirtualLauncher(SupervisorHooks):
    """Launcher whose process is never killed, as the mesh would end with it."""

    def __init__(
        self, process: VirtualProcess, state: StateClient, services: list[service_plan.ServiceSpec]
    ) -> None:
        self.clock: VirtualClock = process.machine.clock
        self.state, self.failure_reason = state, ""
        self._process = process
        self._specs = [
            ChildSpec(
                service.name,
                list(service.argv),
                budget=RESTART_BUDGET,
                is_critical=True,
                stage=stage,
                own_session=True,
            )
            for stage, service in enumerate(services)
        ]
        self._supervisor = self._create_supervisor()
        self._lease_watch = LeaseWatch(
            state, self.clock, HOST_ID, lambda: self._supervisor.children.values()
        )
        self._exit_reports = ExitReportSender(state, self.clock)
        self._is_stopping = False

    def _create_supervisor(self) -> Supervisor:
        return Supervisor(VirtualHost(self._process), self.clock, self._specs, hooks=self)

    async def start(self) -> asyncio.Task[None]:
        await self._supervisor.start()
        return asyncio.create_task(self._lease_watch.run(), name="watch leases")

    async def kill_services(self) -> None:
        """Kill all services at once: they have acted on a rolled-back Redis, and start again."""
        self._is_stopping = True
        for child in self._supervisor.children.values():
            child.kill()
        await self._supervisor.stop(GRACE_S)

    async def restart_services(self) -> None:
        self._supervisor, self._is_stopping = self._create_supervisor(), False
        await self._supervisor.start()

    async def stop(self) -> None:
        self._is_stopping = True
        self._exit_reports.stop()
        await self._supervisor.stop(GRACE_S)

    async def on_exit(self, child: ChildProcess, child_exit: ChildExit) -> None:
        if self._is_stopping or child_exit.is_requested:
            return
        await self._lease_watch.evict(child)
        await self._exit_reports.report(
            ExitReport(
                child.name,
                child_exit.code,
                child_exit.why,
                child_exit.failure,
                final=child_exit.final,
            )
        )

    async def should_reset_budget(self, spec: ChildSpec, child_exit: ChildExit) -> bool:
        return await restart_policy.should_reset_budget(
            self.state, self._exit_reports, spec, child_exit, ""
        )

    def has_lease_expired(self, child: ChildProcess) -> bool:
        return self._lease_watch.has_expired(child)

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        self.failure_reason = f"{spec.name} exits repeatedly ({why})"


RESTART_DELAY_S = 3.0  # from a power cut to the restart of the mesh


@dataclass(frozen=True)
class VirtualMeshSize:
    workers: int = 2
    shards: int = 1
    ranks: int = 1
    steps: int = 20
    jobs: int = 1
    workload: EmulatedWorkload | None = None  # instead of the default job of fault tests
    max_staleness: int = MAX_STALENESS  # of the default job
    colocated: bool = False  # the default job's engines are also on the core's workers


class VirtualRecorder:
    """Recorder of the event stream in `events.jsonl`, as of `meshrl run`, from the end of an
    earlier one.
    """

    def __init__(self, state: StateClient, clock: Clock, run_dir: Path, job: str) -> None:
        self._state, self._clock, self._job = state, clock, job
        self._file = LineFile(run_dir / EVENTS_FILE)
        known = self._file.content.rows
        self._last_event_id = parse_event(known[-1]).id if known else "0"

    async def run(self) -> None:
        while True:
            await self._clock.sleep(POLL_S)
            with suppress(StateUnavailable, StorageFull):
                new = await events.read_all(self._state, self._last_event_id)
                mine = [event for event in new if event.fields.get("job") in (None, "", self._job)]
                if mine:
                    self._file.append([asdict(event) for event in mine])
                if new:
                    self._last_event_id = new[-1].id


class VirtualMesh:
    def __init__(
        self,
        loop: VirtualLoop,
        random: Random,
        root: Path,
        record: EventRecord,
        size: VirtualMeshSize,
    ) -> None:
        self.loop, self.random, self.root, self.record, self.size = loop, random, root, record, size
        self.machine = VirtualMachine(loop, random.child("machine"), record, root)
        self.clock = self.machine.clock
        self.network = MemoryNetwork(self.clock, random.child("network"))
        self.network.on_delivery = lambda source, target, frames: record.log_event(
            f"message {source} {target} {bytes(frames[0]).hex()}"
        )
        self.redis = VirtualRedis(MachineClock(loop), random.child("redis"))
        self.process_context = ProcessContext(
            self.machine, self.network, self.redis, root, size.workload
        )
        self.machine.programs = self.process_context.build_programs() | {
            "launcher": self._run_launcher
        }
        self.lost_files: set[str] = set()  # files lost or cut by power cuts
        self.run_dirs = list_run_dirs(root, size.jobs)
        self.documents: dict[str, dict[str, Any]] = {}
        self.start_error = ""  # why a `meshrl resume` failed
        self._stop_requested = asyncio.Event()
        self._root_process: VirtualProcess | None = None
        self._state: StateClient | None = None

    # -- life cycle ------------------------------------------------------------------------------

    async def start(self) -> None:
        process = self.machine.spawn("launcher", [], "launcher", None, dies_with_parent=False)
        self._root_process = process
        self._state = open_state(self.redis, process)
        size = self.size
        shape = size.workers, size.shards, size.ranks, size.steps
        for seed, (name, run_dir) in enumerate(self.run_dirs.items()):
            run_dir.mkdir(parents=True, exist_ok=True)
            if run_dir != self.root:
                (run_dir / "store").symlink_to(self.root / "store")
            workload = size.workload
            config = (
                workload.build_config(name, seed)
                if workload
                else build_config(*shape, name, seed, size.max_staleness, size.colocated)
            )
            document = write_job(config, run_dir, workload)
            self.documents[name] = document
            await jobs.submit(self._state, name, document, str(run_dir), f"submit {name}")

    async def _run_launcher(self, process: VirtualProcess, argv: list[str]) -> None:
        size = self.size
        services = service_plan.plan_services(size.workers, "cpu", HOST_ID)
        state = open_state(self.redis, process)
        owner = open_state(self.redis, process, is_owner=True)
        gate = VirtualRedisGate(self.redis, owner, self.root, self.run_dirs)
        launcher = VirtualLauncher(process, state, services)
        if not await self._run_command(lambda: self._prepare(gate, state, is_restart=bool(argv))):
            return
        watching = await launcher.start()
        recording = [
            asyncio.create_task(
                VirtualRecorder(state, self.clock, run_dir, job).run(), name=f"record {job}"
            )
            for job, run_dir in self.run_dirs.items()
        ]
        guarding = asyncio.create_task(self._guard_redis(gate, launcher, state), name="guard redis")
        await self._stop_requested.wait()
        guarding.cancel()
        await launcher.stop()
        watching.cancel()
        for task in recording:
            task.cancel()

    async def _prepare(self, gate: VirtualRedisGate, state: StateClient, is_restart: bool) -> None:
        """Prepare the mesh before its services start."""
        await gate.admit_mesh()
        await write_settings(state, PoolSettings())
        if not is_restart:
            return
        for entry in await registry.list_entries(state):  # their processes have ended
            if entry.alive:
                await registry.evict(state, entry.name, entry.incarnation)
        await clear_last_exits(state)
        await self._restore_jobs(gate, state)

    async def _restore_jobs(self, gate: VirtualRedisGate, state: StateClient) -> None:
        """Restore each job that Redis does not have from a checkpoint."""
        await write_settings(state, PoolSettings())
        there = {row.id for row in await jobs.read_jobs(state)}
        for job, run_dir in self.run_dirs.items():
            if job not in there:
                self.record.log_event(f"restore {job}")
                watermark = gate.watermark.jobs.get(job, JobWatermark())
                await restore_job(state, run_dir, job, self.documents[job], watermark)
        await gate.save_restored()

    async def _guard_redis(
        self, gate: VirtualRedisGate, launcher: VirtualLauncher, state: StateClient
    ) -> None:
        """Recover from each rollback of Redis, as a launcher does."""
        async for why in gate.watch_rollbacks():
            self.record.log_event(f"redis rolled back: {why}")
            await launcher.kill_services()
            await gate.start_empty(why)
            if await self._run_command(lambda: self._restore_jobs(gate, state)):
                await launcher.restart_services()

    async def _run_command(self, operation: Callable[[], Awaitable[None]]) -> bool:
        """Run a command-line operation; return False if it fails, with the reason on record."""
        try:
            await retry(self.clock, operation)
        except MeshError as error:
            self.start_error = str(error)
        except Exception as error:  # it would print a traceback
            self.start_error = f"{type(error).__name__}: {error}"
            self.machine.failures.append(f"meshrl resume: {self.start_error}")
        return not self.start_error

    # -- power cuts ------------------------------------------------------------------------------

    async def cut_power(self, random: Random, saved_state: Any) -> None:
        """Cut the power: kill every process, and restart the mesh on the surviving files. Redis
        restarts with `saved_state`. Nothing else happens while the mesh is off, so that evidence
        of lost Redis state is not lost before its check.
        """
        if not self.is_on:
            return
        self.record.log_event("power off")
        self._kill_all()
        self.lost_files |= self.machine.disk.cut_power(random)
        await self._restart(saved_state)

    async def lose_redis(self, saved_state: Any) -> None:
        """Kill every process, and restart the mesh on unchanged files. Redis restarts with
        `saved_state`: an older copy, or None if it cannot load its file.
        """
        self.record.log_event("redis lost state")
        self._kill_all()
        await self._restart(saved_state)

    def _kill_all(self) -> None:
        for process in self.machine.live_processes:
            process.kill()

    async def _restart(self, saved_state: Any) -> None:
        self.redis.restart(saved_state)
        await self.clock.sleep(RESTART_DELAY_S)
        self.start_if_off()

    @property
    def is_on(self) -> bool:
        assert self._root_process is not None
        return not self._root_process.has_exited

    def start_if_off(self) -> None:
        """Start the mesh again if it is off."""
        if not self.is_on and not self.start_error:
            self.record.log_event("power on")
            argv = ["resume"]
            self._root_process = self.machine.spawn(
                "launcher", argv, "launcher", None, dies_with_parent=False
            )

    async def stop(self) -> None:
        self._stop_requested.set()
        assert self._root_process is not None
        await self._root_process.exited.wait()

    @property
    def state(self) -> StateClient:
        assert self._state is not None
        return self._state

    @property
    def is_over(self) -> bool:
        """True if all jobs have ended, or cannot continue."""
        phases = map(self.read_phase, self.run_dirs)
        return bool(self.start_error) or all(phase in ("finished", "failed") for phase in phases)

    @property
    def phase(self) -> str:
        return self.read_phase(JOB_NAME)

    def read_phase(self, job: str) -> str:
        return str(self.redis.sync_client.execute_command("HGET", f"{{{job}}}:job", "phase"))

    def get_side_directory(self, name: str) -> Path:
        """Return a directory of the simulation's own, outside of the run."""
        return self.root.with_name(f"{self.root.name}.{name}")
