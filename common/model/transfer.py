"""Tensors into the weight store and out of it: chunks with digests, named by a manifest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from common.api.weights import Fetch, Manifest, Stage, Staged, Tensor, Weights
from common.bulk import BulkClient
from common.errors import BadMessage
from common.mesh import Mesh
from common.model.lora import is_adapter
from common.patience import patiently
from common.store import STORE, get, put

CHUNK_BYTES = 64 << 20
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
) -> str:
    """Writes tensors durably and returns their manifest's digest; nobody sees the version yet.

    The version has the tensors of `base` too, of which only the names are written; Refused when
    the store does not hold them any more.
    """
    described = [tensor for tensor in base.tensors if tensor.name not in tensors] if base else []
    for chunk in _chunks(tensors):
        content = await mesh.host.run_blocking(_content, chunk, deadline_s=COPY_S)
        digest = await put(mesh, bulk, content, f"storing weights of version {version}")
        offset = 0
        for name, tensor in chunk:
            size = tensor.numel() * tensor.element_size()
            kind = NAMES[tensor.dtype]
            described.append(Tensor(name, kind, list(tensor.shape), digest, offset, size))
            offset += size
    request = Stage(Manifest(job, lineage, version, described))
    ref = mesh.ref(STORE)
    staged: Staged = await patiently(mesh.clock, lambda: ref.call(Weights.stage, request))
    return staged.digest


def _chunks(tensors: Mapping[str, torch.Tensor]) -> list[list[tuple[str, torch.Tensor]]]:
    """What goes into one chunk; adapters never lie in one with what they are added to."""
    chunks: list[list[tuple[str, torch.Tensor]]] = []
    filled, changes = 0, False
    for name, tensor in sorted(tensors.items(), key=lambda item: is_adapter(item[0])):
        size = tensor.numel() * tensor.element_size()
        new = is_adapter(name) != changes or (filled and filled + size > CHUNK_BYTES)
        if new or not chunks:
            chunks.append([])
            filled, changes = 0, is_adapter(name)
        chunks[-1].append((name, tensor))
        filled += size
    return chunks


def _content(chunk: list[tuple[str, torch.Tensor]]) -> memoryview:
    pieces = [tensor.detach().cpu().contiguous().reshape(-1) for _, tensor in chunk]
    arrays = [piece.view(torch.uint8).numpy() for piece in pieces if piece.numel()]
    return memoryview(np.concatenate(arrays).data if arrays else b"")


async def fetch(
    mesh: Mesh, bulk: BulkClient, digest: str
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The tensors of a manifest, in its order; digests are checked chunk by chunk."""
    return await Fetcher(mesh, bulk).fetch(digest)


class Fetcher:
    """Fetches one version after the other. Of versions with adapters it keeps the other chunks,
    which all of them share.
    """

    def __init__(self, mesh: Mesh, bulk: BulkClient) -> None:
        self._mesh, self._bulk = mesh, bulk
        self._kept: dict[str, bytes] = {}
        self.bytes = 0  # that came over

    async def fetch(self, digest: str) -> tuple[Manifest, dict[str, torch.Tensor]]:
        """As the function `fetch`."""
        mesh = self._mesh
        ref = mesh.ref(STORE)
        manifest = await patiently(mesh.clock, lambda: ref.call(Weights.manifest, Fetch(digest)))
        chunks: dict[str, bytes] = {}
        for chunk in dict.fromkeys(t.chunk for t in manifest.tensors):
            if (found := self._kept.get(chunk)) is None:
                found = await get(mesh, self._bulk, chunk, "weights")
                self.bytes += len(found)
            chunks[chunk] = found
        changing = {t.chunk for t in manifest.tensors if is_adapter(t.name)}
        self._kept = {c: chunks[c] for c in chunks if changing and c not in changing}
        tensors = await mesh.host.run_blocking(_tensors, manifest, chunks, deadline_s=COPY_S)
        return manifest, tensors


def _tensors(manifest: Manifest, chunks: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    return {t.name: tensor_of(t, chunks[t.chunk]) for t in manifest.tensors}


def tensor_of(described: Tensor, chunk: bytes) -> torch.Tensor:
    dtype = DTYPES.get(described.dtype)
    content = np.frombuffer(chunk, np.uint8)[described.offset : described.offset + described.size]
    if dtype is None or len(content) != described.size:
        raise BadMessage(f"tensor {described.name} of a manifest does not lie in its chunk")
    return torch.from_numpy(content.copy()).view(dtype).reshape(described.shape)
