"""One look at a mesh for all who record its jobs: what it costs does not grow with their number."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.state import jobs, registry
from common.state.jobs import JobRow
from common.state.registry import Entry
from meshrl.view.mesh.pool import Pool, pool
from meshrl.view.mesh.processes import Meter, Used, names_of, owner
from meshrl.view.recording.running_mesh import RunningMesh

FRESH_S = 0.4  # below the time between two looks of a recorder
JOBS_S = 2.0  # all jobs, with their documents, are more to read
TALLY_S = 2.0  # between readings of CPU times: a process that lives shorter is not counted


@dataclass(frozen=True)
class Look:
    """What Redis says of a mesh: the same for all its jobs."""

    at: float  # monotonic, seconds
    entries: tuple[Entry, ...] = ()
    pool: Pool = field(default_factory=Pool)
    jobs: tuple[JobRow, ...] = ()  # up to JOBS_S older than the rest

    @property
    def live(self) -> list[JobRow]:
        """The jobs that have not ended."""
        return [row for row in self.jobs if not row.ended]


class Looks:
    """The last look at a mesh, taken again when it is no longer fresh."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self.last = Look(float("-inf"))
        self._jobs_at = self._metered_at = float("-inf")
        self._jobs: tuple[JobRow, ...] = ()
        self._turn = asyncio.Lock()
        self._meter = Meter()
        self._names: dict[int, str] = {}
        self.owners: dict[str, str] = {}  # by name of a process that works for one job
        self.used: list[Used] = []

    async def look(self) -> Look:
        """The mesh now. StateUnavailable, DeadlineExceeded."""
        async with self._turn:  # its holder's deadline bounds the wait
            now, state = self._mesh.clock.monotonic(), self._mesh.state
            if now - self.last.at >= FRESH_S:
                entries = await registry.entries(state)
                found = await pool(state)
                if now - self._jobs_at >= JOBS_S:
                    await self._read_jobs(now)
                self.last = Look(now, tuple(entries), found, self._jobs)
                self._names = names_of(entries)
                self.owners |= {entry.name: job for entry in entries if (job := owner(entry))}
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
