"""Files of a job on a process's host: at the run's directory, or fetched by digest.

On other hosts than the run host, a bundle is in `<run_root>/bundles/<digest>/`, shared by all
processes of the host. Each of its folders (`data`, `model`, `modules`, `tokenizer`, ...) is
complete or absent: the first process that needs one fetches it, and the others wait. Least recently
used bundles are removed when they take too many bytes. Files that the host's processes write for a
run are in `<run_root>/runs/<job>/<time of its record>/`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from meshrl.common.api.transfer.bulk_permissions import PUBLISHED
from meshrl.common.api.weights import FilePublication
from meshrl.common.base.files.disk_sync import fsync_tree
from meshrl.common.base.files.file_locks import is_file_at, try_lock, try_lock_file
from meshrl.common.base.files.run_host import RunHost
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.job_data import MODULES, JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable, retry
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.server_state import run_host
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.store.weight_store_client import fetch_file, publish_files

BUNDLES_FOLDER, RUNS_FOLDER = "bundles", "runs"  # below the root
USED_MARKER = ".used"  # of a bundle: locked by its users, touched at each new use
FETCHING_PREFIX = ".fetching-"  # prefix of a folder being fetched
REMOVED_PREFIX = ".gone-"  # prefix of a folder being removed
MAX_UNUSED_BYTES = 64 << 30  # of unused bundles: as much as the largest one
POLL_S = 0.2  # between checks for another process's fetch
PUBLICATION_MAX_AGE_S = 3600.0  # the store retains published files for a few hours
FETCH_TIMEOUT_S = 12 * 3600.0  # for another process to fetch a bundle of any size
IO_TIMEOUT_S = 600.0  # to inspect, sync or remove a folder of any size
# Descriptors that lock the bundles this process uses, one per use.
_held_descriptors: dict[str, list[int]] = {}


async def open_local_job(mesh: Mesh, row: JobRow) -> JobData:
    """Open the job of a row with its bundle on this host, for the device of this process's worker.

    Raises:
        CorruptData: The bundle is not what was packed, and there is no other copy.
        StorageFull: The disk is full.
    """
    data = JobData.from_document(row.id, row.document, row.run_dir).for_device(mesh.settings.device)
    if await is_on_run_host(mesh, data.run_dir):
        return data
    own = local_run_directory(mesh, row)
    await mesh.host.run_blocking(
        lambda: own.mkdir(parents=True, exist_ok=True), deadline_s=IO_TIMEOUT_S
    )
    bundle = await fetch_bundle(mesh, row)
    return data.for_remote_host(bundle, own)


async def is_on_run_host(mesh: Mesh, path: Path) -> bool:
    """Return True if `path` of the run host is the same file here; waits for the run host's record.

    A mesh of one host that accepts no others needs no such record.
    """

    found = await retry(mesh.clock, lambda: _look_up_run_host(mesh))
    if found is None or found.host == mesh.settings.host:
        return True
    is_visible = found.is_visible_on
    return await mesh.host.run_blocking(
        is_visible, mesh.settings.host, path, deadline_s=IO_TIMEOUT_S
    )


async def is_run_host(mesh: Mesh) -> bool:
    """Return True if this host is the run host."""
    found = await _look_up_run_host(mesh)
    return found is None or found.host == mesh.settings.host


async def _look_up_run_host(mesh: Mesh) -> RunHost | None:
    found = await run_host.read_run_host(mesh.state)
    if found is None and mesh.settings.joinable:
        raise ServiceUnavailable(
            "the run host is not registered", fix="Wait until the head has started"
        )
    return found


def local_run_directory(mesh: Mesh, row: JobRow) -> Path:
    """Return the directory of a run's files on a host that does not see the run's directory."""
    return Path(mesh.settings.run_root) / RUNS_FOLDER / row.id / str(row.created_ms)


def bundle_directory(root: str | Path, digest: str) -> Path:
    """Return the path of a bundle on a host with this root, fetched or not."""
    return Path(root) / BUNDLES_FOLDER / digest


async def fetch_bundle(mesh: Mesh, row: JobRow, only_folders: Iterable[str] = ()) -> Path:
    """Fetch a bundle, or some of its folders, to this host and return its directory.

    The bundle is not removed until it is released or this process exits.
    """
    files, digest = bundle_files.read_file_list(row.document), str(row.document["bundle"]["digest"])
    folders = set(only_folders) or {Path(name).parts[0] for name in files}
    directory = bundle_directory(mesh.settings.run_root, digest)
    run = mesh.host.run_blocking
    holding = asyncio.ensure_future(run(_hold_bundle, directory, deadline_s=IO_TIMEOUT_S))
    try:
        await asyncio.shield(holding)
    except asyncio.CancelledError:  # its thread continues and will lock the bundle
        holding.add_done_callback(
            lambda held: None if held.cancelled() or held.exception() else release_bundle(directory)
        )
        raise
    try:
        if await run(_find_missing_folders, directory, folders, deadline_s=IO_TIMEOUT_S):
            async with _fetch_lock(mesh, directory):
                await run(
                    _remove_by_prefix,
                    directory,
                    (FETCHING_PREFIX, REMOVED_PREFIX),
                    deadline_s=IO_TIMEOUT_S,
                )  # left by interrupted fetches
                for folder in sorted(
                    await run(_find_missing_folders, directory, folders, deadline_s=IO_TIMEOUT_S)
                ):
                    await _fetch_folder(mesh, row, directory, folder)
            await run(evict_bundles, directory.parent, MAX_UNUSED_BYTES, deadline_s=IO_TIMEOUT_S)
    except BaseException:
        release_bundle(directory)
        raise
    return directory


async def find_local_modules(mesh: Mesh, modules: str, bundle_digest: str) -> str:
    """Return the directory of a bundle's modules on this host.

    Args:
        modules: Their directory on the run host.
    Raises:
        ServiceUnavailable: The host's agent has not fetched them yet; this process may not.
    """
    if not bundle_digest or await is_on_run_host(mesh, Path(modules)):
        return modules
    directory = bundle_directory(mesh.settings.run_root, bundle_digest)
    if not _held_descriptors.get(str(directory)):  # the caller repeats this and never releases it
        await mesh.host.run_blocking(_hold_bundle, directory, deadline_s=IO_TIMEOUT_S)
    if await mesh.host.run_blocking(
        _find_missing_folders, directory, {MODULES}, deadline_s=IO_TIMEOUT_S
    ):
        raise ServiceUnavailable(f"{directory / MODULES} has not been fetched yet", where=mesh.name)
    return str(directory / MODULES)


def release_bundle(directory: Path) -> None:
    """Release one use of the bundle by this process."""
    if descriptors := _held_descriptors.get(str(directory)):
        os.close(descriptors.pop())


async def _fetch_folder(mesh: Mesh, row: JobRow, directory: Path, folder: str) -> None:
    bulk, run, publication = (
        BulkClient(mesh),
        mesh.host.run_blocking,
        FilePublication(row.id, folders=[folder]),
    )
    scratch = directory / f"{FETCHING_PREFIX}{folder}.{mesh.random.hex_token(4)}"
    files, since = await publish_files(mesh, publication), mesh.clock.monotonic()

    def appear() -> None:  # fails after a cancellation, once the scratch was removed
        fsync_tree(scratch)
        (scratch / folder).rename(directory / folder)

    try:
        for name, digest in files.items():
            if mesh.clock.monotonic() - since > PUBLICATION_MAX_AGE_S:
                files, since = await publish_files(mesh, publication), mesh.clock.monotonic()
            description = f"{name} of the bundle of {row.id}"
            path = scratch / name
            about = mesh, bulk, digest, path, description
            await fetch_file(*about, job=row.id, kind="bundle", space=PUBLISHED)
        await run(appear, deadline_s=IO_TIMEOUT_S)
    finally:
        await run(_remove_folder, scratch, deadline_s=IO_TIMEOUT_S)


def _remove_folder(directory: Path) -> None:
    """Rename a folder before deleting it, so that a concurrent thread installs all of it or
    nothing.
    """
    renamed = directory.with_name(f"{REMOVED_PREFIX}{directory.name.lstrip('.')}")
    with suppress(FileNotFoundError):
        directory.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _remove_by_prefix(directory: Path, prefixes: str | tuple[str, ...]) -> None:
    for path in directory.iterdir() if directory.exists() else ():
        if path.name.startswith(prefixes):
            shutil.rmtree(path, ignore_errors=True)


def _find_missing_folders(directory: Path, folders: set[str]) -> set[str]:
    return {folder for folder in folders if not (directory / folder).exists()}


@asynccontextmanager
async def _fetch_lock(mesh: Mesh, directory: Path) -> AsyncIterator[None]:
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        what = f"a bundle, which another process fetches to {directory}"
        with mesh.wait(what, on=f"node/{mesh.settings.host}"):
            async with mesh.clock.timeout(FETCH_TIMEOUT_S, what):
                while not try_lock(descriptor):
                    await mesh.clock.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


# -- retention -------------------------------------------------------------------------------------


def _hold_bundle(directory: Path) -> None:
    while True:
        place = directory / USED_MARKER
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):  # removed concurrently
            if directory.is_file():
                raise
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # a remover holds its lock only for a moment
        if is_file_at(descriptor, place):
            os.utime(place)
            _held_descriptors.setdefault(str(directory), []).append(descriptor)
            return
        os.close(descriptor)


def remove_leftovers(bundles: Path) -> None:
    """Finish removals that an exited process began; concurrent removals do no harm."""
    _remove_by_prefix(bundles, REMOVED_PREFIX)


def evict_bundles(bundles: Path, max_bytes: int) -> None:
    """Remove least recently used bundles that no process of this host uses, down to `max_bytes`."""
    found = []
    for directory in bundles.iterdir():
        if directory.name.startswith(REMOVED_PREFIX):
            continue
        with suppress(FileNotFoundError):
            found.append(((directory / USED_MARKER).stat().st_mtime, directory))
    sizes = dict.fromkeys((directory for _, directory in found), 0)
    for directory in sizes:
        for path in directory.rglob("*"):
            with suppress(FileNotFoundError):
                about = path.stat()
                sizes[directory] += about.st_size if stat.S_ISREG(about.st_mode) else 0
    total = sum(sizes.values())
    for _, directory in sorted(found):
        if total <= max_bytes:
            return
        if _remove_if_unused(directory):
            total -= sizes[directory]


def _remove_if_unused(directory: Path) -> bool:
    """Remove the bundle and return True if no process uses it."""
    # The marker moves too: processes that wait for it notice the move and start again.
    renamed = directory.with_name(f"{REMOVED_PREFIX}{directory.name}.{os.getpid()}")
    with try_lock_file(directory / USED_MARKER) as nobody:
        if not nobody:
            return False
        try:
            directory.rename(renamed)
        except FileNotFoundError:
            return False
    shutil.rmtree(renamed, ignore_errors=True)
    return True
