"""Stages the rows of weights that somebody holds: puts them into the store as chunks, and tells
what lies where. Ranks do so each with its own, and nobody has a whole version.
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
MAX_PENDING_CHUNKS = 4  # chunks that may be in memory before who lays more has to wait
COPY_TIMEOUT_S = (
    600.0  # deadline of what is done off the loop, because it takes as long as memory does
)


@dataclass(frozen=True)
class StagedVersion:
    """A version that was staged: its manifest with its digest, and who its masters are."""

    manifest: Manifest
    digest: str
    masters_identity: str

    @property
    def published_identity(self) -> str:
        """The identity of what is published."""
        return self.manifest.image


class VersionStager:
    """What one process stages of one version. `async with`: what is still being written when it
    ends otherwise is given up.
    """

    def __init__(
        self, mesh: Mesh, bulk: BulkClient, options: StagingOptions, wait_reason: str
    ) -> None:
        """`wait_reason`: said of it while the store is waited for."""
        self._mesh, self._bulk, self._options, self._wait_reason = mesh, bulk, options, wait_reason
        self._chunk_builder = ChunkBuilder(options)
        self._tasks: list[asyncio.Task[list[TensorPiece]]] = []
        self._write_slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)
        self._is_store_remote: bool | None = (
            None  # whether the store is on another host, once it was asked
        )

    async def __aenter__(self) -> VersionStager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def copy_rows(self, read_rows: Callable[[], Mapping[str, TensorRows]]) -> list[StagedChunk]:
        """Copies rows, which may change afterwards: the chunks to be written now. It blocks."""
        return self._chunk_builder.add_rows(read_rows())

    def start_writing(self, chunks: Iterable[StagedChunk]) -> None:
        """They go on being written."""
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
                if self._is_store_remote:  # deltas of it are made here
                    await chunk_cache.save_chunk(self._mesh, digest, chunk.content)
            else:
                run = self._mesh.host.run_blocking
                digest = await run(compute_digest, chunk.content, deadline_s=COPY_TIMEOUT_S)
        return [replace(piece, chunk=digest) for piece in chunk.pieces]

    async def wait_for_writes(self, max_pending: int = MAX_PENDING_CHUNKS) -> None:
        """Returns once at most so many chunks are not in the store; raises what hinders that."""
        while True:
            pending = [task for task in self._tasks if not task.done()]
            for task in self._tasks:
                if task.done():
                    task.result()
            if len(pending) <= max_pending:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self) -> StagedRows:
        """What was staged, once all of it is in the store."""
        self.start_writing(self._chunk_builder.take_partial_chunk())
        await self.wait_for_writes(0)
        pieces = [piece for task in self._tasks for piece in task.result()]
        return self._chunk_builder.finish(pieces)

    async def close(self) -> None:
        """Nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def sort_pieces(
    meta_tensors: Mapping[str, torch.Tensor], staged: Iterable[StagedRows]
) -> list[TensorPiece]:
    """The pieces of the tensors of `meta_tensors`, in its order, that all have laid together."""
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
    """The version that all have staged together, whose tensors are as `meta_tensors` has their
    types, which are those of the masters, and shapes. One of adapters alone has a `base` that they
    are added to, which counts for neither identity, and a `scale`. BadMessage when rows are
    missing.
    """
    pieces = sort_pieces(meta_tensors, staged)
    if missing := meta_tensors.keys() - {piece.name for piece in pieces}:
        raise BadMessage(f"version {version}: nobody has staged {min(missing)}")
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
    """Has the store keep a version whose chunks it has; nobody sees it yet. AlreadyCommitted when
    its lineage has other weights of that number, Refused when a chunk is gone.
    """
    ref = mesh.ref(STORE_NAME)
    told = await retry(mesh.clock, lambda: ref.call(Weights.stage_version, version.manifest))
    if told != version.digest:
        raise BadMessage(f"the store has a manifest as {told}, and not {version.digest}")
