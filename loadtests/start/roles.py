"""Benchmark of the start of a role process, from a worker's decision until it is ready.

Measured are seconds, and CPU-seconds of the process. Processes are forked and executed in turn, on
a mesh of Redis, weight store and fork server. The model has half a million parameters, whose
loading takes milliseconds. A core continues at version 0 of its job. The hybrid and the rank find
no core, which they do not need in order to be ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtests.measuring.meshed import START_S, meshed
from loadtests.measuring.processes import cpu_s
from loadtests.start.fork_server import fork_server, starting
from loadtests.trainer import digits
from meshrl.common.base.host.settings import SETTINGS_ENV
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_OFF
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import ChildSpec, Supervisor
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs, registry
from meshrl.common.state.pool.workers.process_names import shard_name, worker_name
from meshrl.common.state.pool.workers.rows import Instance, Role, TierBytes, WorkerRow
from meshrl.job import bundle, job_reader
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.instances.desired_roles import DesiredRole, override_commands
from meshrl.services.node.instances.gpu_memory import GpuMemoryGuard
from meshrl.services.node.instances.role_process import RoleProcess, WorkerContext
from meshrl.services.node.instances.segments import MemorySegments
from meshrl.services.node.worker import GangWorker
from meshrl.services.rollout.environments.environment_pool import build_command
from meshrl.services.rollout.environments.environment_process import EnvironmentProcess

LOOK_S = 0.004  # how soon readiness is seen
WORKER = WorkerRow("loadtest", "one", "cpu:0", 0)
ALONE, PAIR = "alone", "pair"  # jobs, of one rank and of two
LENGTH = 16
STEP_S = 30.0


@dataclass
class Started:
    ready_s: float
    cpu_s: float
    fork_server_cpu_s: float = 0.0


def a_worker_of(mesh: Mesh) -> WorkerContext:
    """Return the worker context that role processes of this process share."""
    logs = Path(mesh.settings.run_root) / "logs"
    segments = MemorySegments(lambda: mesh.host.measure_free_space(logs).memory_bytes)
    budgets = Budgets(TierBytes(), mesh.host, logs)
    return WorkerContext(
        mesh, WORKER.id, override_commands([]), logs, budgets, segments, GpuMemoryGuard(mesh)
    )


class Starts:
    """Starts processes of each kind, one at a time, and ends them again."""

    def __init__(self, mesh: Mesh, directory: Path, fork_server_pid: int) -> None:
        self._mesh, self._logs = mesh, directory / "logs"
        self._fork_server = fork_server_pid
        self._jobs: dict[str, JobData] = {}
        self._services = Supervisor(mesh.host, mesh.clock)
        self.kinds: dict[str, Callable[[], Awaitable[Started]]] = {
            "engine": lambda: self._role(Instance("g0.0", ALONE, Role.ROLLOUT)),
            "trainer": lambda: self._role(Instance("g0.1", ALONE, Role.TRAINING, core=True)),
            "helper": lambda: self._role(Instance("g0.2", ALONE, Role.TRAINING)),
            "rank": lambda: self._role(
                Instance("g0.3", PAIR, Role.TRAINING, core=True, ranks=(0, 1)), rank=1
            ),
            "shard": self._shard,
            "environment": self._environment,
        }

    async def open(self, folder: Path) -> None:
        """Open the weight store and both jobs, whose first core has committed version 0."""
        argv = [sys.executable, "-m", "meshrl.services.weights"]
        await self._services.add(ChildSpec("weights", argv, log=self._logs / "weights.log"))
        task = digits.write(folder / "task", (LENGTH,))
        for job, changes in {ALONE: [], PAIR: ["training.ranks=2", "mesh.workers=3"]}.items():
            out = folder / job
            config, base = job_reader.load_config(task.job_file(out, steps=10), changes)
            _, document = bundle.pack_bundle(config, base, out)
            await jobs.submit(self._mesh.state, job, document, str(out), uuid.uuid4().hex)
            self._jobs[job] = JobData.from_document(job, document, str(out))
        await self.kinds["trainer"]()

    async def close(self) -> None:
        await self._services.stop(1.0)

    async def _role(self, resident: Instance, rank: int = 0) -> Started:
        mesh = self._mesh
        around = a_worker_of(mesh)
        leases = LeaseWatch(mesh.state, mesh.clock, mesh.settings.host, list)
        wish = DesiredRole("g0", resident, rank, mesh.name)
        role = RoleProcess(around, wish, leases, lambda: None)
        try:
            return await self._timed(role.name, role.start, lambda: role.pid)
        finally:
            await role.stop("measured", worker_stops=True)

    async def _shard(self) -> Started:
        name = shard_name(ALONE, 0)
        argv = [sys.executable, "-m", "meshrl.services.rollout", "--job", ALONE, "--shard", "0"]
        spec = ChildSpec(name, argv, log=self._logs / "shard.log")
        found = Supervisor(self._mesh.host, self._mesh.clock)
        try:
            return await self._timed(
                name, lambda: found.add(spec), lambda: found.children[name].pid
            )
        finally:
            await found.stop(0.0)
            entry = await registry.lookup(self._mesh.state, name)
            assert entry is not None
            await registry.evict(self._mesh.state, name, entry.incarnation)

    async def _timed(
        self, name: str, start: Callable[[], Awaitable[Any]], pid: Callable[[], int]
    ) -> Started:
        """Measure until `name` is ready in the registry; a service is ready once registered."""
        nursing, began = cpu_s(self._fork_server), time.perf_counter()
        await start()
        async with asyncio.timeout(START_S):
            while True:
                entry = await registry.lookup(self._mesh.state, name)
                if entry and entry.alive and entry.pid == pid() and entry.stats.get("ready", True):
                    break
                await asyncio.sleep(LOOK_S)
        used = cpu_s(pid())
        return Started(time.perf_counter() - began, used, cpu_s(self._fork_server) - nursing)

    async def _environment(self) -> Started:
        """Measure until the environment has answered its first operation."""
        process = EnvironmentProcess(
            self._mesh,
            build_command(self._jobs[ALONE]),
            "environment",
            self._logs / "e.log",
            STEP_S,
        )
        try:
            nursing, began = cpu_s(self._fork_server), time.perf_counter()
            await process.submit((1, "begin", {"prompt": "1+1="}))
            took, used = time.perf_counter() - began, cpu_s(process.pid)
            return Started(took, used, cpu_s(self._fork_server) - nursing)
        finally:
            await process.close()


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Starts, str]]:

    def worker(mesh: Mesh) -> GangWorker:
        return GangWorker(mesh, WORKER, a_worker_of(mesh))

    async with meshed(worker_name(WORKER.id), worker) as (mesh, members):
        directory = members.directory
        (directory / "mesh").mkdir()
        mesh.settings.to_file(directory / "mesh" / "settings.json")
        os.environ[SETTINGS_ENV] = str(directory / "mesh" / "settings.json")
        async with fork_server(mesh.host, directory) as (socket, process):
            starts = Starts(mesh, directory, process.pid)
            try:
                with starting(socket):
                    await starts.open(folder)
                yield starts, socket
            except BaseException:
                for log in sorted((directory / "logs").glob("*")):
                    print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
                raise
            finally:
                await starts.close()


async def measured(folder: Path, repeats: int, only: list[str]) -> dict[str, Any]:
    forked: dict[str, list[Started]] = {}
    executed: dict[str, list[Started]] = {}
    async with opened(folder) as (starts, socket):
        for _ in range(repeats):
            for kind, start in starts.kinds.items():
                if only and kind not in only:
                    continue
                for how, found in ((socket, forked), (FORK_SERVER_OFF, executed)):
                    with starting(how):
                        found.setdefault(kind, []).append(await start())
    figures: dict[str, Any] = {}
    for kind in forked:
        for mark, found in (("", forked), ("spawned_", executed)):
            figures[f"{kind}_{mark}ready_s"] = median(x.ready_s for x in found[kind])
            figures[f"{kind}_{mark}cpu_s"] = median(x.cpu_s for x in found[kind])
    figures |= {
        worst: max(figures[f"{kind}_{key}"] for kind in forked)
        for worst, key in (
            ("role_ready_s", "ready_s"),
            ("role_cpu_s", "cpu_s"),
            ("spawned_ready_s", "spawned_ready_s"),
            ("spawned_cpu_s", "spawned_cpu_s"),
        )
    }
    births = [x.fork_server_cpu_s for found in forked.values() for x in found]
    return figures | {"fork_server_cpu_s_per_start": median(births)}
