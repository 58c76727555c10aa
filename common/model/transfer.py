"""Tensors into the weight store and out of it: chunks with digests, named by a manifest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from common.api.weights import Fetch, Manifest, Stage, Staged, Tensor, Weights
from common.bulk import BulkClient
from common.errors import BadMessage
from common.mesh import Mesh
from common.patience import patiently
from common.store import STORE, get, put

CHUNK_BYTES = 64 << 20
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
) -> str:
    """Writes tensors durably and returns their manifest's digest; nobody sees the version yet."""
    described: list[Tensor] = []
    for chunk in _chunks(tensors):
        content = b"".join(_bytes(tensor) for _, tensor in chunk)
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
    chunks: list[list[tuple[str, torch.Tensor]]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > CHUNK_BYTES:
            chunks.append([])
            filled = 0
        chunks[-1].append((name, tensor))
        filled += size
    return chunks


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


async def fetch(
    mesh: Mesh, bulk: BulkClient, digest: str
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The tensors of a manifest, in its order; digests are checked chunk by chunk."""
    ref = mesh.ref(STORE)
    manifest = await patiently(mesh.clock, lambda: ref.call(Weights.manifest, Fetch(digest)))
    chunks: dict[str, bytes] = {}
    for chunk in dict.fromkeys(t.chunk for t in manifest.tensors):
        chunks[chunk] = await get(mesh, bulk, chunk, "weights")
    return manifest, {t.name: tensor_of(t, chunks[t.chunk]) for t in manifest.tensors}


def tensor_of(described: Tensor, chunk: bytes) -> torch.Tensor:
    dtype = DTYPES.get(described.dtype)
    content = np.frombuffer(chunk, np.uint8)[described.offset : described.offset + described.size]
    if dtype is None or len(content) != described.size:
        raise BadMessage(f"tensor {described.name} of a manifest does not lie in its chunk")
    return torch.from_numpy(content.copy()).view(dtype).reshape(described.shape)
