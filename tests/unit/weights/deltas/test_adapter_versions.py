"""Versions of adapters alone, whose base model is stored once and retained as long as they are."""

from __future__ import annotations

import pytest
import torch

from loadtests.weights.contents import staged_whole
from meshrl.common.api.weights import STORE_NAME, Manifest, ManifestRequest, VersionRef, Weights
from meshrl.common.base.errors import MeshError
from meshrl.common.weights.layout.manifest import RowRange, group_by_chunk, read_complete_manifest
from meshrl.common.weights.receiver import WeightReceiver
from tests.unit.weights.store_processes import Store

JOB = "job"


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.qkv": torch.randn(256, 256, generator=generator) for i in range(4)}


def adapters(version: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{i}.adapters.q_proj.{factor}": torch.full((2, 256), float(version + i))
        for i in range(4)
        for factor in "ab"
    }


ADAPTER_BYTES = 8 * 2 * 256 * 4


class Versions:
    """Base version with adapters, and versions staged on it."""

    def __init__(self, store: Store) -> None:
        self.store, self.base = store, VersionRef(0, 0, "")

    async def begin(self) -> None:
        digest = await self._stage(0, model() | adapters(0))
        self.base = VersionRef(0, 0, digest)

    async def add(self, version: int) -> str:
        return await self._stage(version, adapters(version), self.base, 0.5)

    async def _stage(
        self,
        version: int,
        tensors: dict[str, torch.Tensor],
        base: VersionRef | None = None,
        scale: float = 0.0,
    ) -> str:
        version_args = self.store.mesh, self.store.bulk, JOB, 0, version, tensors
        return await staged_whole(*version_args, base=base, scale=scale)

    async def manifest(self, digest: str, without_base: bool) -> Manifest:
        request = ManifestRequest(digest, without_base)
        manifest: Manifest = await self.store.mesh.ref(STORE_NAME).call(
            Weights.fetch_manifest, request
        )
        return manifest


@pytest.fixture
async def versions(store: Store) -> Versions:
    created = Versions(store)
    await created.begin()
    return created


async def test_version_stores_only_its_adapters(store: Store, versions: Versions) -> None:
    for version in (1, 2, 3):
        stored_bytes = store.bytes
        digest = await versions.add(version)
        assert store.bytes - stored_bytes < ADAPTER_BYTES + 4096  # the manifest is beside them
        adapter_manifest = await versions.manifest(digest, without_base=True)
        assert {piece.name for piece in adapter_manifest.tensors} == adapters(0).keys()
        assert adapter_manifest.base == versions.base and adapter_manifest.scale == 0.5


async def test_receiver_without_base_gets_the_whole_model(store: Store, versions: Versions) -> None:
    await versions.add(1)
    digest = await versions.add(2)
    image = await WeightReceiver(store.mesh, store.bulk).receive(digest)
    expected = model() | adapters(2)
    assert image.tensors.keys() == expected.keys()
    assert all(torch.equal(image.tensors[name], expected[name]) for name in expected)
    assert image.manifest.version == 2
    assert read_complete_manifest(store.chunks.read, digest).tensors == image.manifest.tensors


async def test_receiver_with_base_gets_only_the_adapters(store: Store, versions: Versions) -> None:
    digest = await versions.add(2)
    selection: dict[str, RowRange | None] = dict.fromkeys(adapters(0))
    image = await WeightReceiver(store.mesh, store.bulk).receive(digest, selection)
    assert image.size_bytes == ADAPTER_BYTES and image.tensors.keys() == adapters(0).keys()


async def test_version_is_rejected_if_its_base_is_missing(store: Store, versions: Versions) -> None:
    base = await versions.manifest(versions.base.manifest, without_base=True)
    for digest, pieces in group_by_chunk(base.tensors).items():
        if pieces[0].name in model():
            store.chunks.chunk_path(digest).unlink()
    with pytest.raises(MeshError, match="is not stored"):
        await versions.add(1)
    store.chunks.chunk_path(versions.base.manifest).unlink()
    with pytest.raises(MeshError):
        await versions.add(1)


async def test_version_needs_no_adapters_of_its_base(store: Store, versions: Versions) -> None:
    base = await versions.manifest(versions.base.manifest, without_base=True)
    adapter_chunks = {piece.chunk for piece in base.tensors if piece.name in adapters(0)}
    base_chunks = {piece.chunk for piece in base.tensors} - adapter_chunks
    if adapter_chunks & base_chunks:
        pytest.fail("adapters lie in a chunk with what they are added to")
    for digest in adapter_chunks:
        store.chunks.chunk_path(digest).unlink()
    digest = await versions.add(1)
    assert (await WeightReceiver(store.mesh, store.bulk).receive(digest)).tensors.keys() == (
        model() | adapters(1)
    ).keys()
