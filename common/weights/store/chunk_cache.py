"""Host cache of weight chunks: each chunk crosses the network once for all processes of a host.

Chunks are files `<run_root>/chunks/<d[:2]>/<d>`, named by digest and checked when read. The first
process that needs a chunk fetches it while the others wait. A chunk that cannot be read, saved or
waited for is fetched from the store, so a failing cache causes no errors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.errors import (
    CorruptData,
    DeadlineExceeded,
    MeshError,
    NotFound,
    StorageFull,
)
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkServer, serve_chunks
from meshrl.common.weights.chunks.chunk_store import ChunkStore, make_write_error, try_lock

CHUNKS_FOLDER, LOCKS_FOLDER = "chunks", ".locks"  # below the root, and there
POLL_S = 0.02  # between checks of the lock: short compared to moving a chunk
LOCK_TIMEOUT_S = 120.0  # for another process to fetch a chunk: as long as the bulk port may take
IO_TIMEOUT_S = 60.0  # to read or write a chunk; a slower disk is of no use
MAX_UNUSED_S = 3600.0  # versions follow within minutes, as do restarts of engines
DISK_DIVISOR = 4  # chunks take at most this fraction of the disk space available to them


def open_cache(mesh: Mesh) -> ChunkStore | None:
    """Return the chunk cache of the process's host; None if the host has none."""
    if not mesh.settings.chunks_bytes:
        return None
    return ChunkStore(Path(mesh.settings.run_root) / CHUNKS_FOLDER, mesh.clock.wall)


def serve_cache(mesh: Mesh) -> BulkServer | None:
    """Serve this host's cached chunks to other hosts until the server is closed.

    None if the host has no cache.
    """
    chunks = open_cache(mesh)
    return None if chunks is None else serve_chunks(mesh, chunks, accepts_uploads=False)


@dataclass(frozen=True)
class VersionToFetch:
    """Committed version, and the chunks of it that a host is missing."""

    job: str
    manifest_digest: str
    missing: Mapping[str, int]  # bytes by digest
    # All selected chunks of the version: those on this host are not evicted for the others.
    needed_chunks: Collection[str] = frozenset()
    is_joining: bool = False  # it is the first version of this process

    @property
    def missing_bytes(self) -> int:
        """Bytes of the missing chunks."""
        return sum(self.missing.values())

    def find_still_missing(self, target_store: ChunkStore) -> dict[str, int]:
        """Return the chunks that are still no files of `target_store`."""
        return {
            digest: size for digest, size in self.missing.items() if not target_store.has(digest)
        }


async def free_space(
    mesh: Mesh, chunks: ChunkStore, wanted_bytes: int, needed_chunks: Collection[str] = ()
) -> None:
    """Evict least recently used chunks from this host's own cache to make room for `wanted_bytes`.

    Chunks in `needed_chunks` stay. Other stores are left unchanged.

    Raises:
        StorageFull: There is too little space.
    """
    own = open_cache(mesh)
    if own is None or own.directory != chunks.directory:
        return

    def make() -> bool:
        chunks.directory.mkdir(parents=True, exist_ok=True)
        return _evict_chunks(
            chunks.directory, wanted_bytes, mesh.settings.chunks_bytes, needed_chunks
        )

    try:
        has_space = await mesh.host.run_blocking(make, deadline_s=IO_TIMEOUT_S)
    except OSError as error:
        raise make_write_error(error, chunks.directory) from error
    if not has_space:
        raise StorageFull(
            f"the disk has no space for {wanted_bytes} bytes of weights beyond its reserve",
            where=str(chunks.directory),
            fix="Free disk space, or raise the host's cache limit of "
            f"{mesh.settings.chunks_bytes} bytes",
        )


async def fetch_through_cache(
    mesh: Mesh,
    digest: str,
    fetch: Callable[[], Awaitable[bytes]],
    needed_chunks: Collection[str] = (),
) -> bytes:
    """Return a chunk from the cache, or what `fetch` returns, whose errors are raised.

    A fetched chunk is saved if there is space without evicting `needed_chunks`. Counts
    `chunks_found` and `chunks_fetched`, and the bytes of both.
    """
    chunks = open_cache(mesh)
    if chunks is None:
        return await fetch()
    content = await _read_cached(mesh, chunks, digest)
    if content is None:
        # One lock for all chunks of a folder: there are few lock files, and none is ever removed.
        async with fetch_lock(mesh, chunks.directory / LOCKS_FOLDER / digest[:2]):
            content = await _read_cached(mesh, chunks, digest)
            if content is None:
                content = await fetch()
                mesh.telemetry.count("chunks_fetched")
                mesh.telemetry.count("chunks_fetched_bytes", len(content))
                await _save_chunk(mesh, chunks, digest, content, needed_chunks)
    return content


async def _read_cached(mesh: Mesh, chunks: ChunkStore, digest: str) -> bytes | None:
    def read() -> bytes:
        try:
            content = chunks.read(digest)
        except CorruptData:
            chunks.chunk_path(digest).unlink(missing_ok=True)
            raise
        chunks.mark_used(digest)  # see `_evict_chunks`
        return content

    try:
        content = await mesh.host.run_blocking(read, deadline_s=IO_TIMEOUT_S)
    except (NotFound, OSError, DeadlineExceeded):
        return None
    except CorruptData as error:
        mesh.telemetry.count("chunks_damaged")
        mesh.telemetry.log.warning("a chunk is fetched again", error=str(error))
        return None
    mesh.telemetry.count("chunks_found")
    mesh.telemetry.count("chunks_found_bytes", len(content))
    return content


async def save_chunk(mesh: Mesh, digest: str, content: bytes | memoryview) -> None:
    """Save a chunk made on this host in its cache, if possible, to be served and used for
    deltas.
    """
    chunks = open_cache(mesh)
    if chunks is not None and not chunks.has(digest):
        await _save_chunk(mesh, chunks, digest, content)


async def _save_chunk(
    mesh: Mesh,
    chunks: ChunkStore,
    digest: str,
    content: bytes | memoryview,
    needed_chunks: Collection[str] = (),
) -> None:
    size, most_bytes = memoryview(content).nbytes, mesh.settings.chunks_bytes

    def write() -> bool:
        chunks.directory.mkdir(parents=True, exist_ok=True)
        there = _evict_chunks(chunks.directory, size, most_bytes, needed_chunks)
        if there:  # not durable: readers detect what a power failure corrupted
            chunks.save(digest, content)
        return there

    try:
        is_cached = await mesh.host.run_blocking(write, deadline_s=IO_TIMEOUT_S)
    except (MeshError, OSError) as error:
        is_cached = False
        mesh.telemetry.log.warning("a chunk cannot be cached", chunk=digest, error=str(error))
    if not is_cached:
        mesh.telemetry.count("chunks_not_kept")


def _evict_chunks(
    directory: Path, wanted_bytes: int, max_bytes: int, needed_chunks: Collection[str] = ()
) -> bool:
    """Remove least recently used chunks until there is space for `wanted_bytes` more.

    Needed chunks stay. Nothing is removed if the space would still be too small.
    """
    there = _list_chunk_files(directory)
    used_bytes = sum(size for _, size, _ in there)
    most = min(max_bytes, (shutil.disk_usage(directory).free + used_bytes) // DISK_DIVISOR)
    may_go = []
    for one in there:
        # A scratch file (`.DIGEST.PID.NUMBER`) of another process may be a leftover.
        name, *scratch_parts = one[-1].name.removeprefix(".").split(".")
        if name not in needed_chunks or (scratch_parts and scratch_parts[0] != str(os.getpid())):
            may_go.append(one)
    if wanted_bytes + used_bytes - sum(size for _, size, _ in may_go) > most:
        return False
    for _, size, path in sorted(may_go):
        if used_bytes + wanted_bytes <= most:
            break
        path.unlink(missing_ok=True)
        used_bytes -= size
    return True


def _list_chunk_files(directory: Path) -> list[tuple[float, int, Path]]:
    found = []
    for path in directory.glob("??/*"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found


def remove_unused(root: Path, now_s: float) -> None:
    """Remove chunks unused for `MAX_UNUSED_S`, and scratch files of exited processes.

    Args:
        now_s: Wall time in seconds.
    """
    for used, _, path in _list_chunk_files(root / CHUNKS_FOLDER):
        if used < now_s - MAX_UNUSED_S:
            path.unlink(missing_ok=True)


@asynccontextmanager
async def fetch_lock(mesh: Mesh, path: Path) -> AsyncIterator[None]:
    """Hold a file lock for a fetch; the lock ends with its process.

    It proceeds without the lock after `LOCK_TIMEOUT_S`, or if no lock file can be made.
    """
    descriptor = -1
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = mesh.clock.monotonic() + LOCK_TIMEOUT_S
        while descriptor >= 0 and not try_lock(descriptor) and mesh.clock.monotonic() < until:
            await mesh.clock.sleep(POLL_S)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
