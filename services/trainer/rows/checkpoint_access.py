"""Access to a checkpoint's files from a process of any host."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.checkpoints import check_files
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.store.weight_store_client import fetch_checkpoint

CHECK_TIMEOUT_S = 3600.0  # to read all files


@asynccontextmanager
async def open_checkpoint_files(
    mesh: Mesh,
    bulk: BulkClient,
    data: JobData,
    name: str,
    files: dict[str, str],
    below: Sequence[str],
) -> AsyncIterator[Path]:
    """Yield a directory of this host with a checkpoint's verified files.

    On the run host it is the checkpoint's own directory. Elsewhere it is a copy, removed
    afterwards. Raise CorruptData or NotFound if a file differs from what was written.

    Args:
        files: Digests by path; if empty, the checkpoint's own directory is not verified.
        below: Files, or folders of files, to verify and copy.
    """
    run = mesh.host.run_blocking
    if data.is_on_run_host:
        directory = data.run_dir / "checkpoints" / name
        for part in below if files else ():
            await run(check_files, directory, files, part, deadline_s=CHECK_TIMEOUT_S)
        yield directory
        return
    # Each use has its own copy: uses of a host's ranks, and of one rank, overlap.
    uses = data.local_run_dir / "restored" / mesh.name.replace("/", "-")
    copy = uses / f"{mesh.incarnation}-{mesh.random.hex_token(4)}-{name}"

    def remove_left() -> None:
        """Remove the copies of earlier processes of this name, which were killed."""
        for stale_copy in uses.glob("*"):
            if not stale_copy.name.startswith(mesh.incarnation):
                shutil.rmtree(stale_copy, True)

    try:
        await run(remove_left, deadline_s=CHECK_TIMEOUT_S)
        await fetch_checkpoint(mesh, bulk, data.id, name, below, copy)
        for part in below:
            await run(check_files, copy, files, part, deadline_s=CHECK_TIMEOUT_S)
        yield copy
    finally:
        await run(shutil.rmtree, copy, True, deadline_s=CHECK_TIMEOUT_S)
