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

from meshrl.common.base.errors import Damaged, DeadlineExceeded, MeshError, NotFound, StorageFull
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkServer, serve
from meshrl.common.weights.chunks.chunks import ChunkStore, failure, locked

CHUNKS, LOCKS = "chunks", ".locks"  # below the root, and there
LOOK_S = 0.02  # how often one who waits for another's fetch looks: little beside moving a chunk
WAIT_S = 120.0  # for another process to fetch a chunk: as long as the bulk port may take
IO_S = 60.0  # to read or write a chunk; a disk that takes longer is no help
UNUSED_S = 3600.0  # versions follow each other in minutes, and restarts of engines too
DISK_SHARE = 4  # chunks take no more than one part in so many of what the disk has for them


def cache(mesh: Mesh) -> ChunkStore | None:
    """The chunks of a process's host; None where none are kept."""
    if not mesh.settings.chunks_bytes:
        return None
    return ChunkStore(Path(mesh.settings.run_root) / CHUNKS, mesh.clock.wall)


def serve_cache(mesh: Mesh) -> BulkServer | None:
    """The bulk port by which a host's agent gives others what this host has fetched, until it is
    closed; None: it keeps nothing.
    """
    chunks = cache(mesh)
    return None if chunks is None else serve(mesh, chunks, takes=False)


@dataclass(frozen=True)
class WantedVersion:
    """A committed version, and what a host lacks of it."""

    job: str
    manifest: str  # digest
    lacking: Mapping[str, int]  # bytes of chunks by digest
    # All of its chunks that are wanted: those that are here do not go to make room for the others.
    needed: Collection[str] = frozenset()

    @property
    def bytes(self) -> int:
        """That the host lacks."""
        return sum(self.lacking.values())

    def still_lacking(self, into: ChunkStore) -> dict[str, int]:
        """Those of the chunks that are no files of `into` by now."""
        return {digest: size for digest, size in self.lacking.items() if not into.has(digest)}


async def make_room(
    mesh: Mesh, chunks: ChunkStore, wanted: int, needed: Collection[str] = ()
) -> None:
    """Makes room for so many bytes, if it is in this host's own chunks: those go that were not used
    for longest, and none that is `needed` beside what is wanted. StorageFull when there cannot be
    so much.
    """
    own = cache(mesh)
    if own is None or own.directory != chunks.directory:
        return

    def make() -> bool:
        chunks.directory.mkdir(parents=True, exist_ok=True)
        return _room(chunks.directory, wanted, mesh.settings.chunks_bytes, needed)

    try:
        made = await mesh.host.run_blocking(make, deadline_s=IO_S)
    except OSError as error:
        raise failure(error, chunks.directory) from error
    if not made:
        raise StorageFull(
            f"no room for {wanted} bytes of weights beside what the disk must keep free",
            where=str(chunks.directory),
            fix=f"Free some space, or give the host a larger cache than "
            f"{mesh.settings.chunks_bytes} bytes",
        )


async def through(
    mesh: Mesh,
    digest: str,
    fetch: Callable[[], Awaitable[bytes]],
    needed: Collection[str] = (),
) -> bytes:
    """The bytes of a chunk: those that this host has, or what `fetch` brings from the store, whose
    errors are raised. It is kept if there is room without what is `needed`. `chunks_found` and
    `chunks_fetched` are counted, and the bytes of both.
    """
    chunks = cache(mesh)
    if chunks is None:
        return await fetch()
    content = await _found(mesh, chunks, digest)
    if content is None:
        # One lock for all chunks of a folder: so there are few, and none must ever go.
        async with turn(mesh, chunks.directory / LOCKS / digest[:2]):
            content = await _found(mesh, chunks, digest)
            if content is None:
                content = await fetch()
                mesh.telemetry.count("chunks_fetched")
                mesh.telemetry.count("chunks_fetched_bytes", len(content))
                await _keep(mesh, chunks, digest, content, needed)
    return content


async def _found(mesh: Mesh, chunks: ChunkStore, digest: str) -> bytes | None:
    def read() -> bytes:
        try:
            content = chunks.read(digest)
        except Damaged:
            chunks.path(digest).unlink(missing_ok=True)
            raise
        chunks.use(digest)  # see `_room`
        return content

    try:
        content = await mesh.host.run_blocking(read, deadline_s=IO_S)
    except (NotFound, OSError, DeadlineExceeded):
        return None
    except Damaged as error:
        mesh.telemetry.count("chunks_damaged")
        mesh.telemetry.log.warning("a chunk is fetched again", error=str(error))
        return None
    mesh.telemetry.count("chunks_found")
    mesh.telemetry.count("chunks_found_bytes", len(content))
    return content


async def keep(mesh: Mesh, digest: str, content: bytes | memoryview) -> None:
    """Puts a chunk that this host has made where others of it find it, if it can be: who serves it
    on, and who makes deltas of it.
    """
    chunks = cache(mesh)
    if chunks is not None and not chunks.has(digest):
        await _keep(mesh, chunks, digest, content)


async def _keep(
    mesh: Mesh,
    chunks: ChunkStore,
    digest: str,
    content: bytes | memoryview,
    needed: Collection[str] = (),
) -> None:
    size, most_bytes = memoryview(content).nbytes, mesh.settings.chunks_bytes

    def write() -> bool:
        chunks.directory.mkdir(parents=True, exist_ok=True)
        there = _room(chunks.directory, size, most_bytes, needed)
        if there:  # not durably: whoever reads it finds what a power cut has changed
            chunks.keep(digest, content)
        return there

    try:
        kept = await mesh.host.run_blocking(write, deadline_s=IO_S)
    except (MeshError, OSError) as error:
        kept = False
        mesh.telemetry.log.warning("a chunk is not kept", chunk=digest, error=str(error))
    if not kept:
        mesh.telemetry.count("chunks_not_kept")


def _room(directory: Path, wanted: int, most_bytes: int, needed: Collection[str] = ()) -> bool:
    """Removes chunks, those that were not used for longest first, until there is room for more.
    None goes that is needed; and none at all where there would be too little room without those.
    """
    there = _files(directory)
    held = sum(size for _, size, _ in there)
    most = min(most_bytes, (shutil.disk_usage(directory).free + held) // DISK_SHARE)
    may_go = []
    for one in there:
        # One in the making (`.DIGEST.PID.NUMBER`) by another process may have been left there.
        name, *begun = one[-1].name.removeprefix(".").split(".")
        if name not in needed or (begun and begun[0] != str(os.getpid())):
            may_go.append(one)
    if wanted + held - sum(size for _, size, _ in may_go) > most:
        return False
    for _, size, path in sorted(may_go):
        if held + wanted <= most:
            break
        path.unlink(missing_ok=True)
        held -= size
    return True


def _files(directory: Path) -> list[tuple[float, int, Path]]:
    found = []
    for path in directory.glob("??/*"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found


def sweep(root: Path, now: float) -> None:
    """Removes chunks below a host's root that nobody has used for long, and what processes that
    ended had begun to write. `now`: of the wall clock.
    """
    for used, _, path in _files(root / CHUNKS):
        if used < now - UNUSED_S:
            path.unlink(missing_ok=True)


@asynccontextmanager
async def turn(mesh: Mesh, path: Path) -> AsyncIterator[None]:
    """Begins when no other process fetches under the same lock, which ends with its process; or
    when one has done so for too long, or there can be no lock.
    """
    descriptor = -1
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = mesh.clock.monotonic() + WAIT_S
        while descriptor >= 0 and not locked(descriptor) and mesh.clock.monotonic() < until:
            await mesh.clock.sleep(LOOK_S)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
