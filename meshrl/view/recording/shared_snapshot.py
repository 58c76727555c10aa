"""Snapshot of a mesh shared by its jobs' recorders: its cost does not grow with their number."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from meshrl.common.base.clock import Clock
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.host import Host
from meshrl.common.state import jobs
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot, read_mesh_snapshot
from meshrl.view.mesh.process_usage import (
    CpuMeter,
    ProcessCpuTime,
    find_owner_job,
    map_process_names,
)

MAX_AGE_S = 0.4  # below the time between two polls of a recorder
JOBS_MAX_AGE_S = 2.0  # all jobs, with their documents, are more to read
CPU_SAMPLE_S = 2.0  # between readings of CPU times: a process that lives shorter is not counted


class SharedSnapshot:
    """Last snapshot of a mesh, taken again when it is no longer fresh."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self.latest = MeshSnapshot()
        # monotonic, seconds
        self.taken_at_s = self._jobs_read_at_s = self._metered_at_s = float("-inf")
        self._jobs: tuple[JobRow, ...] = ()
        self._lock = asyncio.Lock()
        self._meter = CpuMeter()
        self._names: dict[int, str] = {}
        self.owner_jobs: dict[str, str] = {}  # by name of a process that works for one job
        self.process_usage: list[ProcessCpuTime] = []

    async def read_snapshot(self) -> MeshSnapshot:
        """Return a fresh snapshot, with jobs up to `JOBS_MAX_AGE_S` old.

        Raises StateUnavailable, DeadlineExceeded.
        """
        async with self._lock:  # its holder's deadline bounds the wait
            now = self._mesh.clock.monotonic()
            if now - self.taken_at_s >= MAX_AGE_S:
                if now - self._jobs_read_at_s >= JOBS_MAX_AGE_S:
                    await self._read_jobs(now)
                self.latest = await read_mesh_snapshot(self._mesh.state, self._jobs)
                self.taken_at_s = now
                self._names = map_process_names(self.latest.entries)
                found = ((entry.name, find_owner_job(entry)) for entry in self.latest.entries)
                self.owner_jobs |= {name: job for name, job in found if job}
            return self.latest

    async def read_live_jobs(self) -> list[JobRow]:
        """Return the jobs that have not ended. Raises StateUnavailable, DeadlineExceeded."""
        async with self._lock:
            await self._read_jobs(self._mesh.clock.monotonic())
            return [row for row in self._jobs if not row.is_terminal]

    async def _read_jobs(self, now_s: float) -> None:
        self._jobs, self._jobs_read_at_s = tuple(await jobs.read_jobs(self._mesh.state)), now_s

    def measure_cpu(self, force: bool = False) -> float:
        """Return when CPU times were read: now if a reading is due or `force` is set."""
        now = self._mesh.clock.monotonic()
        if force or now - self._metered_at_s >= CPU_SAMPLE_S:
            names: Mapping[int, str] = {**self._names, **self._mesh.process_names}
            self.process_usage = self._meter.read(names, list(names))
            self._metered_at_s = now
        return self._metered_at_s


class RunningMesh(Protocol):
    """Mesh that this process has started, with its Redis."""

    state: StateClient

    @property
    def clock(self) -> Clock: ...
    @property
    def host(self) -> Host: ...
    @property
    def mesh_paths(self) -> MeshPaths: ...
    @property
    def is_restoring_state(self) -> bool:
        """True while Redis has lost its state, and jobs are being restored."""

    @property
    def process_names(self) -> dict[int, str]:
        """Names of the mesh's own processes that run now, by pid."""

    def start_program(self, argv: list[str], name: str) -> ChildProcess:
        """Start a program of MeshRL that is no service."""
