"""Transfer of tensors to and from the weight store: chunks with digests, named by a manifest.

A tensor that is larger than a chunk lies in several: the manifest names it once for each piece, in
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.api.weights import Fetch, Manifest, Stage, Staged, Tensor, Weights
from common.errors import BadMessage, Damaged, MeshError, NotFound
from common.model.lora import is_adapter
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.wire.blob import pack
from common.wire.bulk import BulkClient
from common.wire.chunks import digest_of
from common.wire.weight_store import STORE, get, put

CHUNK_BYTES = 64 << 20  # far below what the bulk port takes, and can move within its deadline
COPY_S = 600.0  # deadline of what is done off the loop, because it takes as long as memory does
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}  # safetensors' names
NAMES = {dtype: name for name, dtype in DTYPES.items()}


async def stage(
    mesh: Mesh,
    bulk: BulkClient,
    job: str,
    lineage: int,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    base: Manifest | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> str:
    """Writes tensors durably and returns their manifest's digest; nobody sees the version yet.

    The version has the tensors of `base` too, of which only the names are written; Refused when
    the store does not hold them any more.
    """
    described = [tensor for tensor in base.tensors if tensor.name not in tensors] if base else []
    for chunk in _chunks(tensors, chunk_bytes):
        content = await mesh.host.run_blocking(_content, chunk, deadline_s=COPY_S)
        digest = await put(mesh, bulk, content, f"storing weights of version {version}")
        described += _described(chunk, digest)
    request = Stage(Manifest(job, lineage, version, described))
    ref = mesh.ref(STORE)
    staged: Staged = await patiently(mesh.clock, lambda: ref.call(Weights.stage, request))
    return staged.digest


async def stage_again(
    mesh: Mesh,
    bulk: BulkClient,
    job: str,
    lineage: int,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    manifest: str,
) -> bool:
    """Writes again what the store does not hold of a version as it was written, which `stage`
    gave this manifest; False, and nothing is written, when these are not its tensors.
    """

    def found() -> str:
        described: list[Tensor] = []
        for chunk in _chunks(tensors, CHUNK_BYTES):
            described += _described(chunk, digest_of(_content(chunk)))
        return digest_of(pack(Manifest(job, lineage, version, described)))

    if await mesh.host.run_blocking(found, deadline_s=COPY_S) != manifest:
        return False
    return await stage(mesh, bulk, job, lineage, version, tensors) == manifest


@dataclass(frozen=True)
class _Piece:
    """Elements `first` to `last` of a tensor, or all of it."""

    name: str
    tensor: torch.Tensor
    first: int
    last: int  # exclusive

    @property
    def size(self) -> int:
        return (self.last - self.first) * self.tensor.element_size()


def _pieces(name: str, tensor: torch.Tensor, most_bytes: int) -> Iterator[_Piece]:
    """At least one, none over `most_bytes`."""
    tensor = tensor.detach().contiguous()  # once, not for each piece
    count, most = tensor.numel(), most_bytes // tensor.element_size()
    for first in range(0, max(count, 1), most):
        yield _Piece(name, tensor, first, min(first + most, count))


def _chunks(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> list[list[_Piece]]:
    """What goes into one chunk; adapters never lie in one with what they are added to."""
    chunks: list[list[_Piece]] = []
    filled, changes = 0, False
    for name, tensor in sorted(tensors.items(), key=lambda item: is_adapter(item[0])):
        for piece in _pieces(name, tensor, chunk_bytes):
            full = filled and filled + piece.size > chunk_bytes
            if not chunks or full or is_adapter(name) != changes:
                chunks.append([])
                filled, changes = 0, is_adapter(name)
            chunks[-1].append(piece)
            filled += piece.size
    return chunks


def _described(chunk: list[_Piece], digest: str) -> list[Tensor]:
    """What a manifest tells of the pieces in a chunk."""
    described, offset = [], 0
    for piece in chunk:
        kind, shape = NAMES[piece.tensor.dtype], list(piece.tensor.shape)
        described.append(Tensor(piece.name, kind, shape, digest, offset, piece.size))
        offset += piece.size
    return described


def _content(chunk: list[_Piece]) -> memoryview:
    pieces = [p.tensor.reshape(-1)[p.first : p.last].cpu() for p in chunk]
    arrays = [piece.view(torch.uint8).numpy() for piece in pieces if piece.numel()]
    return memoryview(np.concatenate(arrays).data if arrays else b"")


async def fetch(
    mesh: Mesh, bulk: BulkClient, digest: str
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The tensors of a manifest, in its order; digests are checked chunk by chunk."""
    return await Fetcher(mesh, bulk).fetch(digest)


class Fetcher:
    """Fetches one version after the other; it keeps the chunks of a base that versions with
    adapters share.
    """

    def __init__(self, mesh: Mesh, bulk: BulkClient) -> None:
        self._mesh, self._bulk = mesh, bulk
        self._kept: dict[str, bytes] = {}
        self.bytes = 0  # bytes that came over the network

    async def fetch(self, digest: str) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """The tensors of a manifest, in its order; digests are checked chunk by chunk. Damaged, or
        NotFound, when the store does not hold all of them as they were written.
        """
        mesh = self._mesh
        ref = mesh.ref(STORE)
        manifest = await patiently(mesh.clock, lambda: ref.call(Weights.manifest, Fetch(digest)))
        chunks: dict[str, bytes] = {}
        troubles: list[MeshError] = []
        for chunk in dict.fromkeys(t.chunk for t in manifest.tensors):
            if (found := self._kept.get(chunk)) is None:
                found = await self._chunk(chunk, manifest.job, troubles)
                self.bytes += len(found)
            chunks[chunk] = found
        if troubles:  # all that are damaged were found, so that all are made again at once
            raise troubles[0]
        changing = {t.chunk for t in manifest.tensors if is_adapter(t.name)}
        self._kept = {c: chunks[c] for c in chunks if changing and c not in changing}
        described = manifest.tensors
        tensors = await mesh.host.run_blocking(tensors_of, described, chunks, deadline_s=COPY_S)
        return manifest, tensors

    async def _chunk(self, digest: str, job: str, troubles: list[MeshError]) -> bytes:
        try:
            return await get(self._mesh, self._bulk, digest, "weights", job=job)
        except (NotFound, Damaged) as error:
            troubles.append(error)
            return b""


def tensors_of(described: Iterable[Tensor], chunks: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """The tensors by name, in the order of a manifest; BadMessage when a piece of one is missing.

    `chunks` are contents by digest.
    """
    pieces: dict[str, list[Tensor]] = {}
    for piece in described:
        pieces.setdefault(piece.name, []).append(piece)
    return {name: _joined(found, chunks) for name, found in pieces.items()}


def _joined(pieces: list[Tensor], chunks: Mapping[str, bytes]) -> torch.Tensor:
    name, dtype, shape = pieces[0].name, DTYPES.get(pieces[0].dtype), pieces[0].shape
    if dtype is None:
        raise BadMessage(f"tensor {name} of a manifest has the unknown type {pieces[0].dtype}")
    size = math.prod(shape) * dtype.itemsize
    content = np.concatenate([_lying_in(piece, chunks[piece.chunk]) for piece in pieces])
    if len(content) != size:
        raise BadMessage(f"tensor {name} of a manifest has {len(content)} bytes instead of {size}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(content).view(dtype).reshape(shape)


def _lying_in(piece: Tensor, chunk: bytes) -> NDArray[np.uint8]:
    content = np.frombuffer(chunk, np.uint8)[piece.offset : piece.offset + piece.size]
    if len(content) != piece.size:
        raise BadMessage(f"tensor {piece.name} of a manifest does not lie in its chunk")
    return content
