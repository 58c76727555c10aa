"""Removal of a host's files of runs that are over.

A joined host loses ledgers, partial files, unused weight chunks, and what killed processes had
begun to remove. Every host loses the KV tiers of killed engines.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from meshrl.common.base.errors import MeshError, NotFound
from meshrl.common.generation import kv_directories
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.weights.store import chunk_cache, job_files

SWEEP_S = 3600.0
# Of a job that Redis does not know: Redis may have lost it, and `meshrl resume` may restore it. But
# that starts from another record, for which none of these files counts.
UNKNOWN_JOB_TTL_S = 24 * 3600.0
IO_S = 600.0


async def sweep_forever(mesh: Mesh) -> None:
    """Sweep every hour until cancelled; log errors."""
    while True:
        try:
            await sweep(mesh)
        except (MeshError, OSError) as error:
            mesh.telemetry.log.warning("old runs could not be removed", error=str(error))
        await mesh.clock.sleep(SWEEP_S)


async def sweep(mesh: Mesh) -> None:
    """Delete KV tiers of killed engines, leftovers, and files of jobs that are over or started
    again.

    Files of a job that Redis does not know are deleted UNKNOWN_JOB_TTL_S seconds after their last
    change. On a run host only KV tiers and leftovers are deleted: its directories are the runs.
    """
    run, root = mesh.host.run_blocking, Path(mesh.settings.run_root)
    await run(job_files.remove_leftovers, root / job_files.BUNDLES_FOLDER, deadline_s=IO_S)
    await run(kv_directories.remove_abandoned, mesh.settings.run_root, deadline_s=IO_S)
    if await job_files.is_run_host(mesh):
        return
    await run(chunk_cache.remove_unused, root, mesh.clock.wall(), deadline_s=IO_S)
    for directory in await run(
        _list_run_directories, root / job_files.RUNS_FOLDER, deadline_s=IO_S
    ):
        job, created_ms = directory.parent.name, directory.name
        try:
            row = await jobs.read_job(mesh.state, job)
            is_over = row.is_terminal or str(row.created_ms) != created_ms
        except NotFound:
            is_over = (
                await run(_age_s, directory, mesh.clock.wall(), deadline_s=IO_S) > UNKNOWN_JOB_TTL_S
            )
        if is_over:
            mesh.telemetry.log.info("removed", directory=str(directory))
            await run(_remove, directory, deadline_s=IO_S)


def _list_run_directories(runs: Path) -> list[Path]:
    """Return directories named as by `job_files.local_run_directory`."""
    return sorted(path for path in runs.glob("*/*") if path.is_dir() and path.name.isdecimal())


def _age_s(directory: Path, now_s: float) -> float:
    """Return the seconds since the last change of a directory or of a file in it."""
    times = [path.stat().st_mtime for path in (directory, *directory.rglob("*"))]
    return now_s - max(times)


def _remove(directory: Path) -> None:
    """Delete a run directory, and its job's directory if that is empty then."""
    shutil.rmtree(directory, ignore_errors=True)
    if not any(directory.parent.iterdir()):
        directory.parent.rmdir()
