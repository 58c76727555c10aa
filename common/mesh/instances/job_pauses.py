"""Tells a process that works for one job when that job is paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs

POLL_S = 1.0  # so much of a pause may count as the job's time


@asynccontextmanager
async def follow_job_pauses(mesh: Mesh, job: str) -> AsyncIterator[None]:
    """Within the block the mesh's `job_clock` stands still while the job is paused."""
    following = asyncio.create_task(_poll_pauses(mesh, job), name=f"pauses of {job}")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])


async def _poll_pauses(mesh: Mesh, job: str) -> None:
    while True:
        with suppress(MeshError):  # Redis is away: it stays as it was
            mesh.job_clock.set_paused(await jobs.is_paused(mesh.state, job))
        await mesh.clock.sleep(POLL_S)
