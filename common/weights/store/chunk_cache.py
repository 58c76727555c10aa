"""The chunks of weights that a host has fetched from the weight store of another host: each crosses
the network once for all processes of the host.

They lie in `<run_root>/chunks/<d[:2]>/<d>` under their digests, by which they are checked when they
are read. Whoever needs a chunk first fetches it while the others wait. It is a cache: what cannot
be read, kept or waited for is fetched from the store, and nothing fails for it.
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
POLL_S = 0.02  # how often one who waits for another's fetch looks: little beside moving a chunk
LOCK_TIMEOUT_S = 120.0  # for another process to fetch a chunk: as long as the bulk port may take
IO_TIMEOUT_S = 60.0  # to read or write a chunk; a disk that takes longer is no help
MAX_UNUSED_S = 3600.0  # versions follow each other in minutes, and restarts of engines too
DISK_DIVISOR = 4  # chunks take no more than one part in so many of what the disk has for them


def open_cache(mesh: Mesh) -> ChunkStore | None:
    """The chunks of a process's host; None where none are kept."""
    if not mesh.settings.chunks_bytes:
        return None
    return ChunkStore(Path(mesh.settings.run_root) / CHUNKS_FOLDER, mesh.clock.wall)


def serve_cache(mesh: Mesh) -> BulkServer | None:
    """The bulk port by which a host's agent gives others what this host has fetched, until it is
    closed; None: it keeps nothing.
    """
    chunks = open_cache(mesh)
    return None if chunks is None else serve_chunks(mesh, chunks, accepts_uploads=False)


@dataclass(frozen=True)
class VersionToFetch:
    """A committed version, and what a host lacks of it."""

    job: str
    manifest_digest: str  # digest
    missing: Mapping[str, int]  # bytes of chunks by digest
    # All of its chunks that are wanted: those that are here do not go to make room for the others.
    needed_chunks: Collection[str] = frozenset()

    @property
    def missing_bytes(self) -> int:
        """That the host lacks."""
        return sum(self.missing.values())

    def find_still_missing(self, target_store: ChunkStore) -> dict[str, int]:
        """Those of the chunks that are no files of `target_store` by now."""
        return {
            digest: size for digest, size in self.missing.items() if not target_store.has(digest)
        }


async def free_space(
    mesh: Mesh, chunks: ChunkStore, wanted_bytes: int, needed_chunks: Collection[str] = ()
) -> None:
    """Makes room for so many bytes, if it is in this host's own chunks: those go that were not used
    for longest, and none that is `needed_chunks` beside what is wanted. StorageFull when there
    cannot be so much.
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
        made = await mesh.host.run_blocking(make, deadline_s=IO_TIMEOUT_S)
    except OSError as error:
        raise make_write_error(error, chunks.directory) from error
    if not made:
        raise StorageFull(
            f"no room for {wanted_bytes} bytes of weights beside what the disk must keep free",
            where=str(chunks.directory),
            fix=f"Free some space, or give the host a larger cache than "
            f"{mesh.settings.chunks_bytes} bytes",
        )


async def fetch_through_cache(
    mesh: Mesh,
    digest: str,
    fetch: Callable[[], Awaitable[bytes]],
    needed_chunks: Collection[str] = (),
) -> bytes:
    """The bytes of a chunk: those that this host has, or what `fetch` brings from the store, whose
    errors are raised. It is kept if there is room without what is `needed_chunks`. `chunks_found`
    and `chunks_fetched` are counted, and the bytes of both.
    """
    chunks = open_cache(mesh)
    if chunks is None:
        return await fetch()
    content = await _read_cached(mesh, chunks, digest)
    if content is None:
        # One lock for all chunks of a folder: so there are few, and none must ever go.
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
        chunks.mark_used(digest)  # see `_room`
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
    """Puts a chunk that this host has made where others of it find it, if it can be: who serves it
    on, and who makes deltas of it.
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
        if there:  # not durably: whoever reads it finds what a power cut has changed
            chunks.save(digest, content)
        return there

    try:
        kept = await mesh.host.run_blocking(write, deadline_s=IO_TIMEOUT_S)
    except (MeshError, OSError) as error:
        kept = False
        mesh.telemetry.log.warning("a chunk is not kept", chunk=digest, error=str(error))
    if not kept:
        mesh.telemetry.count("chunks_not_kept")


def _evict_chunks(
    directory: Path, wanted_bytes: int, max_bytes: int, needed_chunks: Collection[str] = ()
) -> bool:
    """Removes chunks, those that were not used for longest first, until there is room for more.
    None goes that is needed; and none at all where there would be too little room without those.
    """
    there = _list_chunk_files(directory)
    held = sum(size for _, size, _ in there)
    most = min(max_bytes, (shutil.disk_usage(directory).free + held) // DISK_DIVISOR)
    may_go = []
    for one in there:
        # One in the making (`.DIGEST.PID.NUMBER`) by another process may have been left there.
        name, *begun = one[-1].name.removeprefix(".").split(".")
        if name not in needed_chunks or (begun and begun[0] != str(os.getpid())):
            may_go.append(one)
    if wanted_bytes + held - sum(size for _, size, _ in may_go) > most:
        return False
    for _, size, path in sorted(may_go):
        if held + wanted_bytes <= most:
            break
        path.unlink(missing_ok=True)
        held -= size
    return True


def _list_chunk_files(directory: Path) -> list[tuple[float, int, Path]]:
    found = []
    for path in directory.glob("??/*"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found


def remove_unused(root: Path, now_s: float) -> None:
    """Removes chunks below a host's root that nobody has used for long, and what processes that
    ended had begun to write. `now_s`: of the wall clock.
    """
    for used, _, path in _list_chunk_files(root / CHUNKS_FOLDER):
        if used < now_s - MAX_UNUSED_S:
            path.unlink(missing_ok=True)


@asynccontextmanager
async def fetch_lock(mesh: Mesh, path: Path) -> AsyncIterator[None]:
    """Begins when no other process fetches under the same lock, which ends with its process; or
    when one has done so for too long, or there can be no lock.
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
