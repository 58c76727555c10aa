"""A tensor that is larger than a chunk lies in several, and is whole again when it is read."""

from __future__ import annotations

import torch

from loadtests.weights.contents import staged_whole
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receive import Receiver
from meshrl.services.weights.export import read_tensors
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
    digest = await staged_whole(store.mesh, bulk, "job", 0, 0, TENSORS, most=MOST)
    image = await Receiver(store.mesh, bulk).receive(digest)
    assert image.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert image.tensors[name].dtype == tensor.dtype
        assert torch.equal(image.tensors[name], tensor)
    described = image.manifest.tensors
    assert all(store.chunks.path(t.chunk).stat().st_size <= MOST for t in described)
    assert len([t for t in described if t.name == "layers.0.qkv"]) == 10
    exported = read_tensors(store.chunks, digest)
    assert all(torch.equal(exported[name], tensor) for name, tensor in TENSORS.items())


async def test_a_version_is_read_some_tensors_at_a_time(store: Store) -> None:
    digest = await staged_whole(store.mesh, store.bulk, "job", 0, 0, TENSORS, most=MOST)
    version = await Receiver(store.mesh, store.bulk).source(digest)
    assert sorted(version.outline) == sorted(TENSORS)
    for names in (["one", "layers.0.qkv"], list(version.outline)):
        found = await version.some(names)
        assert list(found) == names
        assert all(torch.equal(found[name], TENSORS[name]) for name in names)
        assert all(found[name].dtype == version.outline[name].dtype for name in names)
