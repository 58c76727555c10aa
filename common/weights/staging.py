"""Staging of weight rows: writes them to the store as chunks and records their positions.

Each rank stages its own rows, so no process needs a whole version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from meshrl.common.api.weights import STORE_NAME, Manifest, TensorPiece, VersionRef, Weights
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import (
    ChunkBuilder,
    StagedChunk,
    StagedRows,
    StagingOptions,
    TensorRows,
)
from meshrl.common.weights.layout.identity import TensorSpec, compute_identity, merge_trees
from meshrl.common.weights.layout.manifest import check_pieces, encode_manifest
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.weight_store_client import look_up_store, put_chunk

MAX_CONCURRENT_WRITES = 2  # chunks: one is hashed while another waits for the disk
MAX_PENDING_CHUNKS = 4  # chunks in memory before staging has to wait
COPY_TIMEOUT_S = 600.0  # of blocking work, which is bound by memory bandwidth


@dataclass(frozen=True)
class StagedVersion:
    """Staged version: manifest, digest, and identity of its masters."""

    manifest: Manifest
    digest: str
    masters_identity: str

    @property
    def published_identity(self) -> str:
        """Identity of the published image."""
        return self.manifest.image


class VersionStager:
    """Stager of one process's rows of one version; leaving the context cancels pending writes."""

    def __init__(
        self, mesh: Mesh, bulk: BulkClient, options: StagingOptions, wait_reason: str
    ) -> None:
        """Create the stager.

        Args:
            wait_reason: Reported while the process waits for the store.
        """
        self._mesh, self._bulk, self._options, self._wait_reason = mesh, bulk, options, wait_reason
        self._chunk_builder = ChunkBuilder(options)
        self._tasks: list[asyncio.Task[list[TensorPiece]]] = []
        self._write_slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)
        self._is_store_remote: bool | None = (
            None  # True if the store is on another host; None before it was looked up
        )

    async def __aenter__(self) -> VersionStager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def copy_rows(self, read_rows: Callable[[], Mapping[str, TensorRows]]) -> list[StagedChunk]:
        """Copy rows, which may change afterwards; return the chunks to write now. Blocking."""
        return self._chunk_builder.add_rows(read_rows())

    def start_writing(self, chunks: Iterable[StagedChunk]) -> None:
        """Start writing chunks in the background."""
        for chunk in chunks:
            task = asyncio.create_task(self._write_chunk(chunk), name="stage a chunk")
            task.add_done_callback(consume_exception)
            self._tasks.append(task)

    async def _write_chunk(self, chunk: StagedChunk) -> list[TensorPiece]:
        async with self._write_slots:
            if self._options.write_chunks:
                digest = await put_chunk(self._mesh, self._bulk, chunk.content, self._wait_reason)
                if self._is_store_remote is None:
                    entry = await retry(self._mesh.clock, lambda: look_up_store(self._mesh))
                    self._is_store_remote = entry.host != self._mesh.settings.host
                if self._is_store_remote:  # deltas of it are made on this host
                    await chunk_cache.save_chunk(self._mesh, digest, chunk.content)
            else:
                run = self._mesh.host.run_blocking
                digest = await run(compute_digest, chunk.content, deadline_s=COPY_TIMEOUT_S)
        return [replace(piece, chunk=digest) for piece in chunk.pieces]

    async def wait_for_writes(self, max_pending: int = MAX_PENDING_CHUNKS) -> None:
        """Wait until at most `max_pending` chunks are being written; raise the first write
        error.
        """
        while True:
            pending = [task for task in self._tasks if not task.done()]
            for task in self._tasks:
                if task.done():
                    task.result()
            if len(pending) <= max_pending:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self) -> StagedRows:
        """Return the staged rows once all of them are in the store."""
        self.start_writing(self._chunk_builder.take_partial_chunk())
        await self.wait_for_writes(0)
        pieces = [piece for task in self._tasks for piece in task.result()]
        return self._chunk_builder.finish(pieces)

    async def close(self) -> None:
        """Cancel all writes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def sort_pieces(
    meta_tensors: Mapping[str, torch.Tensor], staged: Iterable[StagedRows]
) -> list[TensorPiece]:
    """Return the pieces of the tensors in `meta_tensors`, in that order, from all stagers."""
    order = {name: place for place, name in enumerate(meta_tensors)}
    pieces = [piece for one in staged for piece in one.pieces if piece.name in order]
    return sorted(pieces, key=lambda piece: (order[piece.name], piece.begin))


def build_version(
    job: str,
    lineage: int,
    version: int,
    meta_tensors: Mapping[str, torch.Tensor],
    staged: Sequence[StagedRows],
    base: VersionRef | None = None,
    scale: float = 0.0,
) -> StagedVersion:
    """Build a version from the rows staged by all ranks.

    Args:
        meta_tensors: Shapes, and dtypes of the masters, by tensor name.
        base: Of a version of adapters alone: the version they apply to; not part of the identities.
        scale: Scale of these adapters.
    Raises:
        BadMessage: Rows are missing.
    """
    pieces = sort_pieces(meta_tensors, staged)
    if missing := meta_tensors.keys() - {piece.name for piece in pieces}:
        raise BadMessage(f"version {version}: no rank has staged {min(missing)}")
    check_pieces(pieces)
    published = {piece.name: TensorSpec(piece.dtype, tuple(piece.shape)) for piece in pieces}
    masters = {name: TensorSpec.from_tensor(tensor) for name, tensor in meta_tensors.items()}
    image = compute_identity(published, merge_trees(one.published_parts for one in staged))
    manifest = Manifest(job, lineage, version, pieces, base, image=image, scale=scale)
    digest = compute_digest(encode_manifest(manifest))
    return StagedVersion(
        manifest,
        digest,
        compute_identity(masters, merge_trees(one.masters_parts for one in staged)),
    )


async def stage_manifest(mesh: Mesh, version: StagedVersion) -> None:
    """Store a version's manifest, whose chunks are stored; it is not visible until its commit.

    Raises:
        AlreadyCommitted: Its lineage has other weights of that number.
        Refused: A chunk is missing.
    """
    ref = mesh.ref(STORE_NAME)
    stored_digest = await retry(
        mesh.clock, lambda: ref.call(Weights.stage_version, version.manifest)
    )
    if stored_digest != version.digest:
        raise BadMessage(f"the store has the manifest {stored_digest} instead of {version.digest}")
