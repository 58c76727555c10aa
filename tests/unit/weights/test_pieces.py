"""A tensor that is larger than a chunk lies in several, and is whole again when it is read."""

from __future__ import annotations

import pytest
import torch

from common.errors import BadMessage
from common.model.transfer import fetch, stage, tensors_of
from common.wire.bulk import BulkClient
from services.weights.export import read_tensors
from tests.unit.weights.storing import Store

MOST = 1000  # bytes: stands for the limit of a chunk, and for that of the bulk port
TENSORS = {
    "layers.0.qkv": torch.arange(2500, dtype=torch.float32).reshape(50, 50),
    "layers.1.qkv": torch.arange(999, dtype=torch.bfloat16).reshape(3, 333).T,
    "layers.2.qkv": torch.arange(6, dtype=torch.int64),
    "layers.3.adapters.q_proj.a": torch.arange(300, dtype=torch.float32),
    "one": torch.tensor(7.0),
    "norm": torch.arange(3, dtype=torch.uint8),
}


async def test_a_tensor_larger_than_the_bulk_port_takes_travels_in_pieces(store: Store) -> None:
    bulk = BulkClient(store.mesh, largest_bytes=MOST)
    digest = await stage(store.mesh, bulk, "job", 0, 0, TENSORS, chunk_bytes=MOST)
    manifest, found = await fetch(store.mesh, bulk, digest)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    for chunk in {t.chunk for t in manifest.tensors}:
        assert store.chunks.path(chunk).stat().st_size <= MOST
    assert len([t for t in manifest.tensors if t.name == "layers.0.qkv"]) == 10
    exported = read_tensors(store.chunks, digest)
    assert all(torch.equal(exported[name], tensor) for name, tensor in TENSORS.items())


async def test_pieces_of_a_base_are_kept_for_its_adapters(store: Store) -> None:
    first = await stage(store.mesh, store.bulk, "job", 0, 0, TENSORS, chunk_bytes=MOST)
    base, _ = await fetch(store.mesh, store.bulk, first)
    adapters = {"layers.3.adapters.q_proj.a": torch.ones(300)}
    second = await stage(store.mesh, store.bulk, "job", 0, 1, adapters, base=base, chunk_bytes=MOST)
    _, found = await fetch(store.mesh, store.bulk, second)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[n], t) for n, t in (TENSORS | adapters).items())


async def test_a_tensor_that_lacks_a_piece_is_told_by_name(store: Store) -> None:
    digest = await stage(store.mesh, store.bulk, "job", 0, 0, TENSORS, chunk_bytes=MOST)
    manifest, _ = await fetch(store.mesh, store.bulk, digest)
    chunks = {t.chunk: store.chunks.read(t.chunk) for t in manifest.tensors}
    lacking = [t for t in manifest.tensors if t.name == "layers.0.qkv"][1:]
    with pytest.raises(BadMessage, match=r"layers\.0\.qkv"):
        tensors_of(lacking, chunks)
