"""Versions staged by one process that holds all of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from meshrl.common.api.transfer.deltas import Base
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.safetensors_file import NAMES
from meshrl.common.model.files.source import nbytes
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.layout.laying import How, whole
from meshrl.common.weights.layout.manifest import chunk_bytes
from meshrl.common.weights.staging import COPY_S, Stager, assembled, keep


async def staged_whole(
    mesh: Mesh,
    bulk: BulkClient,
    job: str,
    lineage: int,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    base: Base | None = None,
    scale: float = 0.0,
    dtype: str = "",
    most: int = 0,
) -> str:
    """Stages tensors that somebody holds whole, each in its own type unless a `dtype` is given, in
    chunks of at most `most` bytes; the manifest's digest.
    """
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(dtype or NAMES[tensor.dtype], {})[name] = tensor
    size = sum(map(nbytes, tensors.values()))
    laid = []
    for kind, some in kinds.items():
        how = How(kind, most or chunk_bytes(size))
        async with Stager(mesh, bulk, how, f"storing weights of version {version}") as stager:
            lay = partial(stager.lay, partial(whole, some))
            stager.write(await mesh.host.run_blocking(lay, deadline_s=COPY_S))
            laid.append(await stager.end())
    made = assembled(job, lineage, version, tensors, laid, base, scale)
    await keep(mesh, made)
    return made.digest
