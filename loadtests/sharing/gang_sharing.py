"""Jobs on one gang of a running mesh: budgets of its tiers, places, and a record of time slices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from loadtests.jobs.mesh import RunningMesh
from loadtests.measuring.processes import beside
from meshrl.common.api.node import SliceRecord
from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.owner_mesh import open_owner_mesh
from meshrl.view.mesh.gang_slices import is_time_sliced, read_gang_slices

POLL_S = 1.0
PLACED_S = 120.0  # until both cores share a gang


@contextlib.contextmanager
def declared_budgets(environ: MutableMapping[str, str], **sizes_bytes: int) -> Iterator[None]:
    """Declare so many bytes of tiers for each worker of meshes that start in the block."""
    declared = {f"MESHRL_{tier.upper()}_BYTES": str(size) for tier, size in sizes_bytes.items()}
    environ.update(declared)
    try:
        yield
    finally:
        for name in declared:
            del environ[name]


async def place_beside(mesh: RunningMesh, job: str, partner: str) -> str:
    """Place a job beside another as soon as the planner knows both; return its decision."""
    until = time.monotonic() + PLACED_S
    while True:
        try:
            return await mesh.client.place(job, partner)
        except MeshError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(POLL_S)


@dataclass
class SliceRecording:
    """Time slices of all gangs of a mesh, and the bytes of its cores."""

    by_gang: dict[str, dict[tuple[int, float], SliceRecord]] = field(default_factory=dict)
    state_bytes: int = 0  # of a core's parameters and moments on its worker

    @property
    def slices(self) -> list[SliceRecord]:
        """All time slices."""
        return [one for records in self.by_gang.values() for one in records.values()]

    def find_sharing_jobs(self) -> set[str]:
        """Return the jobs that had time slices on a gang on which other jobs had some, too."""
        jobs_of_gangs = [{one.job for one in found.values()} for found in self.by_gang.values()]
        return {job for jobs in jobs_of_gangs if len(jobs) > 1 for job in jobs}

    def describe_sharing(self) -> dict[str, Any]:
        """Return counts of slices by job, of switches between jobs, and of what they moved."""
        counts: defaultdict[str, int] = defaultdict(int)
        switches = 0
        for records in self.by_gang.values():
            in_order = sorted(records.values(), key=lambda one: one.granted_s)
            switches += sum(a.job != b.job for a, b in itertools.pairwise(in_order))
            for one in in_order:
                counts[f"slices_{one.job}"] += 1
        moves = [move for one in self.slices for move in one.moves]
        return {
            "job_switches": switches,
            "slices": len(self.slices),
            **dict(sorted(counts.items())),
            "slices_cut": sum(one.end in ("killed", "lost") for one in self.slices),
            "kinds_moved": len(moves),
            "moved_bytes": sum(move.size_bytes for move in moves),
        }

    async def poll(self, mesh: RunningMesh) -> None:
        """Add slices and bytes until cancelled. The next poll reads what a failed one misses."""
        since_s = 0.0
        while True:
            with contextlib.suppress(MeshError, OSError, TimeoutError):
                async with open_owner_mesh(MeshPaths(mesh.root)) as own:
                    while True:
                        now = time.time()
                        await self._read_gangs(mesh, own, since_s)
                        since_s = now - 2 * POLL_S
                        await asyncio.sleep(POLL_S)
            await asyncio.sleep(POLL_S)

    async def _read_gangs(self, mesh: RunningMesh, own: Mesh, since_s: float) -> None:
        for gang in await pool.read_gangs(mesh.state):
            for instance in gang.instances:
                for report in instance.reports.values():
                    size_bytes = report.usage.accelerator * int(instance.core)
                    self.state_bytes = max(self.state_bytes, size_bytes)
            if is_time_sliced(gang):
                read = await read_gang_slices(own, gang, since_s)
                records = self.by_gang.setdefault(gang.id, {})
                records.update(((one.number, one.requested_s), one) for one in read.slices)


@contextlib.asynccontextmanager
async def record_slices(mesh: RunningMesh) -> AsyncIterator[SliceRecording]:
    """Record the time slices of all gangs, and the bytes of cores, during the block."""
    found = SliceRecording()
    async with beside(found.poll(mesh)):
        yield found
