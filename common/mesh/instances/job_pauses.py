"""Pauses of the one job that a process works for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs

POLL_S = 1.0  # seconds of a pause that may count as the job's time


@asynccontextmanager
async def follow_job_pauses(mesh: Mesh, job: str) -> AsyncIterator[None]:
    """Stop the mesh's `job_clock` while the job is paused, within the block."""
    following = asyncio.create_task(_poll_pauses(mesh, job), name=f"pauses of {job}")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])


async def _poll_pauses(mesh: Mesh, job: str) -> None:
    while True:
        with suppress(MeshError):  # Redis is unavailable: keep the clock's state
            mesh.job_clock.set_paused(await jobs.is_paused(mesh.state, job))
        await mesh.clock.sleep(POLL_S)
