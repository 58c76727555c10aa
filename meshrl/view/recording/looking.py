"""One snapshot of a mesh for all who record its jobs: its cost does not grow with their number."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from meshrl.common.base.clock import Clock
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Host
from meshrl.common.state import jobs
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace
from meshrl.view.mesh.processes import Meter, Used, names_of, owner
from meshrl.view.mesh.snapshot import MeshSnapshot, read_mesh

FRESH_S = 0.4  # below the time between two looks of a recorder
JOBS_S = 2.0  # all jobs, with their documents, are more to read
TALLY_S = 2.0  # between readings of CPU times: a process that lives shorter is not counted


class SharedSnapshot:
    """The last snapshot of a mesh, taken again when it is no longer fresh."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self.last = MeshSnapshot()
        self.at = self._jobs_at = self._metered_at = float("-inf")  # monotonic, seconds
        self._jobs: tuple[JobRow, ...] = ()
        self._turn = asyncio.Lock()
        self._meter = Meter()
        self._names: dict[int, str] = {}
        self.owners: dict[str, str] = {}  # by name of a process that works for one job
        self.used: list[Used] = []

    async def look(self) -> MeshSnapshot:
        """The mesh now, its jobs up to JOBS_S ago. StateUnavailable, DeadlineExceeded."""
        async with self._turn:  # its holder's deadline bounds the wait
            now = self._mesh.clock.monotonic()
            if now - self.at >= FRESH_S:
                if now - self._jobs_at >= JOBS_S:
                    await self._read_jobs(now)
                self.last = await read_mesh(self._mesh.state, self._jobs)
                self.at = now
                self._names = names_of(self.last.entries)
                found = ((entry.name, owner(entry)) for entry in self.last.entries)
                self.owners |= {name: job for name, job in found if job}
            return self.last

    async def live(self) -> list[JobRow]:
        """The jobs that have not ended, as they are now. StateUnavailable, DeadlineExceeded."""
        async with self._turn:
            await self._read_jobs(self._mesh.clock.monotonic())
            return [row for row in self._jobs if not row.ended]

    async def _read_jobs(self, now: float) -> None:
        self._jobs, self._jobs_at = tuple(await jobs.jobs(self._mesh.state)), now

    def measure(self, force: bool = False) -> float:
        """When `used` was read, which is now if it is time again, or by `force`."""
        now = self._mesh.clock.monotonic()
        if force or now - self._metered_at >= TALLY_S:
            names: Mapping[int, str] = {**self._names, **self._mesh.pids}
            self.used = self._meter.read(names, list(names))
            self._metered_at = now
        return self._metered_at


class RunningMesh(Protocol):
    """A mesh that this process has started, with its Redis."""

    state: State

    @property
    def clock(self) -> Clock: ...
    @property
    def host(self) -> Host: ...
    @property
    def place(self) -> MeshPlace: ...
    @property
    def going_back(self) -> bool:
        """True while Redis has lost what it had, and jobs are being put back."""

    @property
    def pids(self) -> dict[int, str]:
        """Names of the mesh's own processes that run now, by pid."""

    def start_program(self, argv: list[str], name: str) -> Child:
        """Start a program of MeshRL that is no service."""
