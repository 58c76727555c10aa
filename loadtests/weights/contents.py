"""Tensors to publish: model-like random tensors from a seed, all of them different."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from meshrl.common.api.transfer.deltas import VersionRef
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.safetensors_writer import DTYPE_NAMES
from meshrl.common.model.files.tensor_source import count_bytes
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.chunk_builder import StagingOptions, as_complete_rows
from meshrl.common.weights.layout.identity import MerkleTree, TensorSpec, compute_identity
from meshrl.common.weights.layout.manifest import choose_chunk_bytes
from meshrl.common.weights.staging import (
    COPY_TIMEOUT_S,
    VersionStager,
    build_version,
    stage_manifest,
)

WIDTH = 1024  # elements of a row
TENSOR_BYTES = 16 << 20  # of a tensor, about a layer's projection
DRAWN = TENSOR_BYTES // 2  # elements that are drawn: a tensor's, so that no two chunks are alike
SPREAD = 0.02  # standard deviation of a model's weights
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Tensors = dict[str, torch.Tensor]


async def staged_whole(
    mesh: Mesh,
    bulk: BulkClient,
    job: str,
    lineage: int,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: VersionRef | None = None,
    scale: float = 0.0,
    dtype: str = "",
    most: int = 0,
) -> str:
    """Stage whole tensors in chunks of at most `most` bytes; return the manifest's digest."""
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(dtype or DTYPE_NAMES[tensor.dtype], {})[name] = tensor
    size = sum(map(count_bytes, tensors.values()))
    laid = []
    for kind, some in kinds.items():
        how = StagingOptions(kind, most or choose_chunk_bytes(size))
        async with VersionStager(
            mesh, bulk, how, f"storing weights of version {version}"
        ) as stager:
            lay = partial(stager.copy_rows, partial(as_complete_rows, some))
            stager.start_writing(await mesh.host.run_blocking(lay, deadline_s=COPY_TIMEOUT_S))
            laid.append(await stager.finish())
    made = build_version(job, lineage, version, tensors, laid, base, scale)
    await stage_manifest(mesh, made)
    return made.digest


def shapes(size: int, dtype: torch.dtype, each: int = TENSOR_BYTES) -> Iterator[tuple[str, int]]:
    """Return name and rows of tensors with `size` bytes together; the last one has the
    remainder.
    """
    row = WIDTH * dtype.itemsize
    rows, most = size // row, each // row
    for number in range(-(-rows // most)):
        yield f"layers.{number}.weight", min(most, rows - number * most)


def drawn(size: int, dtype: torch.dtype, seed: int = 0, each: int = TENSOR_BYTES) -> Tensors:
    """Draw normally distributed tensors of `size` bytes in total."""
    generator = torch.Generator().manual_seed(seed)
    base = SPREAD * torch.randn(DRAWN, generator=generator)
    found: Tensors = {}
    for number, (name, rows) in enumerate(shapes(size, dtype, each)):
        count = rows * WIDTH
        turned = torch.roll(base, 7919 * number)
        scaled = turned[:count] * (1 + number / 1024)
        found[name] = scaled.to(dtype).reshape(rows, WIDTH).contiguous()
    return found


def empty(size: int, dtype: torch.dtype, each: int = TENSOR_BYTES) -> Tensors:
    return {name: torch.ones(rows, WIDTH, dtype=dtype) for name, rows in shapes(size, dtype, each)}


def change(tensors: Mapping[str, torch.Tensor], share: float, seed: int) -> int:
    """Move a share of the elements of bfloat16 tensors to the next number; return how many."""
    generator = torch.Generator().manual_seed(seed)
    changed = 0
    for tensor in tensors.values():
        flat = tensor.view(torch.int16).reshape(-1)
        chosen = torch.rand(len(flat), generator=generator) < share
        places = chosen.nonzero()[:, 0]
        away = torch.randint(0, 2, (len(places),), generator=generator) * 2 - 1
        flat[places] += away.to(torch.int16)
        changed += len(places)
    return changed


def identity_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the identity of all tensors together, by `meshrl.common.weights.layout.identity`."""
    described = {name: TensorSpec.from_tensor(tensor) for name, tensor in tensors.items()}
    trees = {name: MerkleTree() for name in tensors}
    for name, tensor in tensors.items():
        trees[name].add_rows(tensor, 0)
    return compute_identity(described, trees)
