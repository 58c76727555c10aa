"""File operations of the store on the run host for processes that do not see its files.

It assembles checkpoints, imports files of checkpoints and bundles as chunks, and removes leftovers.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api.transfer.bulk_permissions import PUBLISHED
from meshrl.common.base.errors import MeshError, NotFound, Refused
from meshrl.common.job.bundle import bundle_files
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.checkpoints import (
    check_paths,
    compute_file_digests,
    install_checkpoint,
    quarantine_checkpoint,
    read_manifest,
)
from meshrl.common.records.line_files import RunLineFile
from meshrl.common.state.jobs import JobRow
from meshrl.common.weights.chunks.chunk_store import ChunkStore

T = TypeVar("T")
ANSWER_TIMEOUT_S = (
    20.0  # before a caller is answered that the task runs; well below the deadlines of the calls
)
STALL_TIMEOUT_S = (
    600.0  # without a byte: a disk may sync a gigabyte for minutes, and no step is longer
)
RESULT_RETENTION_S = 60.0  # of a result for callers that ask again
POLL_S = 5.0  # between checks for moved bytes
MAX_TASK_S = 30 * 86400.0  # of a task; a stall ends it earlier
ASSEMBLY_INFIX = ".laying-"  # in the name of a directory being assembled
OnProgress = Callable[[int], None]  # called with bytes read or copied


class TaskProgress:
    def __init__(self) -> None:
        self.moved_bytes = 0
        self.is_abandoned = False  # no caller waits for it any more

    def __call__(self, size_bytes: int) -> None:
        """Count moved bytes. Refused: the task was abandoned, which ends its thread at the next
        block.
        """
        if self.is_abandoned:
            raise Refused("the operation was cancelled")
        self.moved_bytes += size_bytes


class SharedTasks:
    def __init__(
        self, mesh: Mesh, answer_s: float = ANSWER_TIMEOUT_S, stall_s: float = STALL_TIMEOUT_S
    ) -> None:
        self._mesh, self._answer_s, self._stall_s = mesh, answer_s, stall_s
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    async def join(
        self, key: Hashable, work: Callable[[TaskProgress], T], description: str
    ) -> T | None:
        """Return the result of `work`, run once for concurrent callers with the same `key`.

        None while it runs: call again. MeshError: it stalled, or an error of `work`.
        """
        if key not in self._tasks:
            task = asyncio.create_task(self._run_watched(work, description), name=description)
            self._tasks[key] = task
            task.add_done_callback(lambda ended: self._expire_later(key, ended))
        task = self._tasks[key]
        await asyncio.wait([task], timeout=self._answer_s)
        if not task.done():
            return None
        self._forget(key, task)
        found: T = task.result()
        return found

    async def stop(self) -> None:
        running = list(self._tasks.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _expire_later(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        task.get_loop().call_later(RESULT_RETENTION_S, self._forget, key, task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mesh.telemetry.log.warning(task.get_name(), error=str(error))

    def _forget(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _run_watched(self, work: Callable[[TaskProgress], T], description: str) -> T:
        progress, clock = TaskProgress(), self._mesh.clock
        run = self._mesh.host.run_blocking(work, progress, deadline_s=MAX_TASK_S)
        running = asyncio.ensure_future(run)
        last_bytes, since = 0, clock.monotonic()
        try:
            while not running.done():
                await asyncio.wait([running], timeout=min(POLL_S, self._stall_s))
                if progress.moved_bytes != last_bytes:
                    last_bytes, since = progress.moved_bytes, clock.monotonic()
                elif not running.done() and clock.monotonic() - since >= self._stall_s:
                    raise MeshError(
                        f"{description} has made no progress for {self._stall_s:g} s, after "
                        f"{last_bytes} bytes",
                        where=self._mesh.name,
                        fix="Check whether the disk of the run host responds",
                    )
            return running.result()
        finally:
            progress.is_abandoned = True
            running.cancel()


def assemble_checkpoint(
    chunks: ChunkStore, manifest_path: Path, files: dict[str, str], on_progress: OnProgress
) -> None:
    """Assemble a checkpoint's directory beside its future manifest from chunks, atomically.

    Raises:
        Refused: A chunk is missing.
        BadMessage: A path leads out of the directory.
    """
    directory = manifest_path.with_suffix("")
    check_paths(files)
    if directory.is_dir() and compute_file_digests(directory, on_progress) == files:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    # One per call: a stalled call may continue beside the next.
    scratch = Path(
        tempfile.mkdtemp(prefix=f"{directory.name}{ASSEMBLY_INFIX}", dir=directory.parent)
    )
    try:
        chunks.assemble(files, scratch, on_progress)
        install_checkpoint(scratch, directory, on_progress=on_progress)
    except NotFound as error:
        raise Refused(error.message, where=error.where, fix="Put the files first") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_files(
    chunks: ChunkStore,
    row: JobRow,
    checkpoint: str,
    folders: Sequence[str],
    on_progress: OnProgress,
) -> dict[str, str]:
    """Import files of a job's bundle or of a checkpoint as chunks; return their digests by path.

    Raises:
        NotFound: A file is missing.
        CorruptData: The checkpoint's manifest is corrupt.
    """
    if checkpoint:
        directory = Path(row.run_dir) / "checkpoints" / checkpoint
        files = dict(read_manifest(directory.with_name(f"{checkpoint}.json"))["files"])
    else:
        directory = Path(row.document["bundle"]["dir"])
        files = {
            name: str(digest)
            for name, (_, digest) in bundle_files.read_file_list(row.document).items()
        }
    chosen = {
        name: digest
        for name, digest in files.items()
        if not folders or any(Path(name).is_relative_to(part) for part in folders)
    }
    published = chunks.open_space(PUBLISHED)
    for name, digest in chosen.items():
        published.import_file(directory / name, digest, on_progress)
    return chosen


def append_lines(host: Host, row: JobRow, name: str, lines: bytes) -> None:
    """Append lines to a run's samples or traces. StorageFull: disk full. BadMessage: invalid
    name.
    """
    file = RunLineFile(host, Path(row.run_dir), name)
    try:
        file.write(lines)
    finally:
        file.close_file()


def remove_unfinished_checkpoints(
    directory: Path, committed: str, on_quarantine: Callable[[Path, Path], None]
) -> None:
    """Remove checkpoints that were never committed, and quarantine those without a manifest.

    The committed one stays: if its manifest is missing, it is corrupt. An older checkpoint without
    manifest is quarantined.

    Args:
        on_quarantine: Called at once with the missing manifest's path and the quarantine path.
    """
    for path in sorted(directory.glob("step-*")):
        manifest = path.with_name(f"{path.name}.json")
        if not path.is_dir() or path.name == committed or manifest.is_file():
            continue
        # Scratch directories have a dot in their name; no commit has named them or newer ones.
        if "." in path.name or path.name > committed:
            shutil.rmtree(path, ignore_errors=True)
        elif (quarantined_path := quarantine_checkpoint(manifest)) is not None:
            on_quarantine(manifest, quarantined_path)
