"""Stages the rows of weights that somebody holds: puts them into the store as chunks, and tells
what lies where. Ranks do so each with its own, and nobody has a whole version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from meshrl.common.api.weights import STORE, Base, Manifest, Tensor, Weights
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.identity import Described, identity, merged
from meshrl.common.weights.layout.laying import Chunk, How, Laid, Laying, Part
from meshrl.common.weights.layout.manifest import check, packed
from meshrl.common.weights.store import host_chunks
from meshrl.common.weights.store.weight_store import put, store_entry

WRITTEN_AT_ONCE = 2  # chunks: one is hashed while another waits for the disk
UNWRITTEN = 4  # chunks that may be in memory before who lays more has to wait
COPY_S = 600.0  # deadline of what is done off the loop, because it takes as long as memory does


@dataclass(frozen=True)
class StagedVersion:
    """A version that was staged: its manifest with its digest, and who its masters are."""

    manifest: Manifest
    digest: str
    masters: str

    @property
    def image(self) -> str:
        """The identity of what is published."""
        return self.manifest.image


class Stager:
    """What one process stages of one version. `async with`: what is still being written when it
    ends otherwise is given up.
    """

    def __init__(self, mesh: Mesh, bulk: BulkClient, how: How, what: str) -> None:
        """`what`: said of it while the store is waited for."""
        self._mesh, self._bulk, self._how, self._what = mesh, bulk, how, what
        self._laying = Laying(how)
        self._tasks: list[asyncio.Task[list[Tensor]]] = []
        self._turn = asyncio.Semaphore(WRITTEN_AT_ONCE)
        self._far: bool | None = None  # whether the store is on another host, once it was asked

    async def __aenter__(self) -> Stager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def lay(self, rows: Callable[[], Mapping[str, Part]]) -> list[Chunk]:
        """Copies rows, which may change afterwards: the chunks to be written now. It blocks."""
        return self._laying.add(rows())

    def write(self, chunks: Iterable[Chunk]) -> None:
        """They go on being written."""
        for chunk in chunks:
            task = asyncio.create_task(self._written(chunk), name="stage a chunk")
            task.add_done_callback(looked_at)
            self._tasks.append(task)

    async def _written(self, chunk: Chunk) -> list[Tensor]:
        async with self._turn:
            if self._how.write:
                digest = await put(self._mesh, self._bulk, chunk.content, self._what)
                if self._far is None:
                    entry = await patiently(self._mesh.clock, lambda: store_entry(self._mesh))
                    self._far = entry.host != self._mesh.settings.host
                if self._far:  # deltas of it are made here
                    await host_chunks.keep(self._mesh, digest, chunk.content)
            else:
                run = self._mesh.host.run_blocking
                digest = await run(digest_of, chunk.content, deadline_s=COPY_S)
        return [replace(piece, chunk=digest) for piece in chunk.pieces]

    async def settled(self, most: int = UNWRITTEN) -> None:
        """Returns once at most so many chunks are not in the store; raises what hinders that."""
        while True:
            pending = [task for task in self._tasks if not task.done()]
            for task in self._tasks:
                if task.done():
                    task.result()
            if len(pending) <= most:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def end(self) -> Laid:
        """What was staged, once all of it is in the store."""
        self.write(self._laying.rest())
        await self.settled(0)
        pieces = [piece for task in self._tasks for piece in task.result()]
        return self._laying.laid(pieces)

    async def close(self) -> None:
        """Nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def in_order(outline: Mapping[str, torch.Tensor], laid: Iterable[Laid]) -> list[Tensor]:
    """The pieces of the tensors of `outline`, in its order, that all have laid together."""
    order = {name: place for place, name in enumerate(outline)}
    pieces = [piece for one in laid for piece in one.pieces if piece.name in order]
    return sorted(pieces, key=lambda piece: (order[piece.name], piece.begin))


def assembled(
    job: str,
    lineage: int,
    version: int,
    outline: Mapping[str, torch.Tensor],
    laid: Sequence[Laid],
    base: Base | None = None,
    scale: float = 0.0,
) -> StagedVersion:
    """The version that all have staged together, whose tensors are as `outline` has their types,
    which are those of the masters, and shapes. One of adapters alone has a `base` that they are
    added to, which counts for neither identity, and a `scale`. BadMessage when rows are missing.
    """
    pieces = in_order(outline, laid)
    if missing := outline.keys() - {piece.name for piece in pieces}:
        raise BadMessage(f"version {version}: nobody has staged {min(missing)}")
    check(pieces)
    published = {piece.name: Described(piece.dtype, tuple(piece.shape)) for piece in pieces}
    masters = {name: Described.of(tensor) for name, tensor in outline.items()}
    image = identity(published, merged(one.image for one in laid))
    manifest = Manifest(job, lineage, version, pieces, base, image=image, scale=scale)
    digest = digest_of(packed(manifest))
    return StagedVersion(manifest, digest, identity(masters, merged(one.masters for one in laid)))


async def keep(mesh: Mesh, version: StagedVersion) -> None:
    """Has the store keep a version whose chunks it has; nobody sees it yet. AlreadyCommitted when
    its lineage has other weights of that number, Refused when a chunk is gone.
    """
    ref = mesh.ref(STORE)
    told = await patiently(mesh.clock, lambda: ref.call(Weights.stage, version.manifest))
    if told != version.digest:
        raise BadMessage(f"the store has a manifest as {told}, and not {version.digest}")
