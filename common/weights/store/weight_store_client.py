"""Client of the weight store's bulk port: writes and reads finished groups, weight chunks and
files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from meshrl.common.api.transfer.bulk_permissions import GROUPS, PUBLISHED, WEIGHTS
from meshrl.common.api.weights import (
    STORE_NAME,
    CheckpointAssembly,
    ChunkVerification,
    FilePublication,
    Weights,
)
from meshrl.common.base.errors import CorruptData, PeerLost
from meshrl.common.base.files import corruption
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable, retry
from meshrl.common.records.checkpoints import check_paths
from meshrl.common.state import events, registry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import CorruptionEvent
from meshrl.common.weights.chunks.partial_file import PartialFile
from meshrl.common.weights.store import chunk_cache

STALL_TIMEOUT_S = 2.0  # without a byte, for dispensable data


async def look_up_store(mesh: Mesh) -> registry.RegistryEntry:
    """Return the weight store's registry entry. ServiceUnavailable: it has no live lease."""
    entry = await registry.lookup(mesh.state, STORE_NAME)
    if entry is None or not entry.alive:
        raise ServiceUnavailable(
            "the weight store has no live lease", fix="Wait until the weight store has restarted"
        )
    return entry


async def put_chunk(
    mesh: Mesh,
    bulk: BulkClient,
    content: bytes | memoryview,
    wait_reason: str,
    *,
    space: str = WEIGHTS,
) -> str:
    """Write bytes durably, waiting for the store if necessary, and return their digest."""

    return await _write_with_retry(
        mesh, bulk, wait_reason, lambda entry: bulk.put_chunk(entry, content, space=space)
    )


async def publish_pending_events(mesh: Mesh, pending_events: deque[CorruptionEvent]) -> None:
    """Publish events of chunks that a writer found corrupt and wrote again."""
    while pending_events:
        await retry(
            mesh.clock,
            partial(events.append, mesh.state, corruption.CORRUPTION_EVENT, *pending_events[0]),
        )
        pending_events.popleft()


async def fetch_chunk(
    mesh: Mesh,
    bulk: BulkClient,
    digest: str,
    wait_reason: str,
    *,
    job: str = "",
    space: str = WEIGHTS,
    needed_chunks: Collection[str] | None = None,
    timeout_s: float | None = None,
) -> bytes:
    """Return the bytes of a digest, waiting for the store if necessary.

    Args:
        needed_chunks: If given, use the host's chunk cache, because other processes of this host
            need
            these chunks too; they are not evicted.
        timeout_s: Try once for so long, for data that is dispensable; also fail after
            `STALL_TIMEOUT_S` without a byte.
    Raises:
        NotFound: The store does not have the bytes.
        CorruptData: They are corrupt; the store has quarantined them and reported it for the job.
        DeadlineExceeded: `timeout_s` has passed.
    """
    bounds = {} if timeout_s is None else {"deadline_s": timeout_s, "stall_s": STALL_TIMEOUT_S}

    async def once() -> bytes:
        entry = await look_up_store(mesh)

        def fetch() -> Awaitable[bytes]:
            return bulk.fetch_chunk(entry, digest, space=space, **bounds)

        try:
            if needed_chunks is not None and entry.host != mesh.settings.host:
                return await chunk_cache.fetch_through_cache(mesh, digest, fetch, needed_chunks)
            return await fetch()
        except CorruptData:
            kind = "group" if space == GROUPS else "weights"
            await _verify_in_store(mesh, digest, kind, job, space)
            raise

    with mesh.wait(wait_reason, on=STORE_NAME):
        if timeout_s is None:
            return await retry(mesh.clock, once)
        async with mesh.clock.timeout(timeout_s, wait_reason):
            return await once()


async def put_file(mesh: Mesh, bulk: BulkClient, path: Path, wait_reason: str) -> str:
    """Write a file's content durably, as `put_chunk`; it may exceed memory."""

    return await _write_with_retry(
        mesh, bulk, wait_reason, lambda entry: bulk.put_file(entry, path)
    )


async def _write_with_retry(
    mesh: Mesh,
    bulk: BulkClient,
    wait_reason: str,
    write: Callable[[registry.RegistryEntry], Awaitable[str]],
) -> str:
    async def tried() -> str:
        return await write(await look_up_store(mesh))

    with mesh.wait(wait_reason, on=STORE_NAME):
        digest = await retry(mesh.clock, tried)
        await publish_pending_events(mesh, bulk.pending_events)
    return digest


async def fetch_file(
    mesh: Mesh,
    bulk: BulkClient,
    digest: str,
    path: Path,
    wait_reason: str,
    *,
    job: str = "",
    kind: str = "weights",
    space: str = WEIGHTS,
) -> None:
    """Write the bytes of a digest to a file: complete, durable and with mode 0600, or not at all.

    It retries as `fetch_chunk` does; bytes received before an outage of the store are retained.
    """

    async def once() -> None:
        try:
            await bulk.fetch_to_file(await look_up_store(mesh), arriving, space=space)
        except CorruptData:
            await _verify_in_store(mesh, digest, kind, job, space)
            raise

    with mesh.wait(wait_reason, on=STORE_NAME), PartialFile.for_file(path, digest) as arriving:
        await retry(mesh.clock, once)


async def publish_files(mesh: Mesh, request: FilePublication) -> dict[str, str]:
    """Make files on the run host chunks of the store, and return their digests by path.

    It takes as long as copying them, unless they are on the store's disk. NotFound, CorruptData.
    """
    store = mesh.ref(STORE_NAME)
    with mesh.wait(f"the publication of files of {request.job}", on=STORE_NAME):
        while True:
            answer = await retry(mesh.clock, lambda: store.call(Weights.publish_files, request))
            if answer.is_complete:
                return answer.files


async def assemble_checkpoint(mesh: Mesh, request: CheckpointAssembly) -> None:
    """Wait until the store has assembled a checkpoint's directory on the run host from its
    chunks.
    """
    store = mesh.ref(STORE_NAME)
    with mesh.wait(f"the assembly of checkpoint {request.name}", on=STORE_NAME):
        while not await retry(mesh.clock, lambda: store.call(Weights.assemble_checkpoint, request)):
            pass


async def _verify_in_store(mesh: Mesh, digest: str, kind: str, job: str, space: str) -> None:
    """Raise PeerLost if the store's chunk is valid: then the bytes were corrupted in transit.

    Args:
        kind: A kind of `meshrl.common.base.files.corruption`.
    """
    if await mesh.ref(STORE_NAME).call(
        Weights.verify_chunk, ChunkVerification(digest, kind, job, space)
    ):
        raise PeerLost(f"chunk {digest} arrived corrupt", where=STORE_NAME) from None


async def fetch_checkpoint(
    mesh: Mesh, bulk: BulkClient, job: str, name: str, folders: Sequence[str], directory: Path
) -> None:
    """Fetch a checkpoint's files into `directory` from the run host.

    Args:
        folders: Files to fetch, or folders whose files to fetch.
    Raises:
        NotFound: A file is missing.
        CorruptData: A file is not what was written.
    """
    files = await publish_files(mesh, FilePublication(job, name, list(folders)))
    check_paths(files)
    for path, digest in files.items():
        place, description = directory / path, f"{path} of checkpoint {name}"
        about = mesh, bulk, digest, place, description
        await fetch_file(*about, job=job, kind="checkpoint", space=PUBLISHED)
