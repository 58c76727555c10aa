"""Versions of a model with adapters: the model lies in the store once, engines fetch the rest."""

from __future__ import annotations

import pytest
import torch

from common.errors import MeshError
from common.model.lora import is_adapter
from common.model.transfer import Fetcher, stage
from tests.unit.weights.storing import Store

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


MODEL_BYTES = 4 * 256 * 256 * 4
ADAPTER_BYTES = 8 * 2 * 256 * 4


async def test_a_version_costs_its_adapters(store: Store) -> None:
    fetcher = Fetcher(store.mesh, store.bulk)
    first = await stage(store.mesh, store.bulk, JOB, 0, 0, model() | adapters(0))
    manifest, tensors = await fetcher.fetch(first)
    assert fetcher.bytes == MODEL_BYTES + ADAPTER_BYTES == sum(t.size for t in manifest.tensors)
    for version in (1, 2, 3):
        stored, fetched = store.bytes, fetcher.bytes
        digest = await stage(
            store.mesh, store.bulk, JOB, 0, version, adapters(version), base=manifest
        )
        assert store.bytes - stored < ADAPTER_BYTES + 4096  # the manifest is beside them
        manifest, tensors = await fetcher.fetch(digest)
        assert fetcher.bytes - fetched == ADAPTER_BYTES
        expected = model() | adapters(version)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert manifest.version == version


async def test_a_newcomer_gets_the_whole_model_of_any_version(store: Store) -> None:
    base = await stage(store.mesh, store.bulk, JOB, 0, 0, model() | adapters(0))
    manifest, _ = await Fetcher(store.mesh, store.bulk).fetch(base)
    later = await stage(store.mesh, store.bulk, JOB, 0, 1, adapters(1), base=manifest)
    _, tensors = await Fetcher(store.mesh, store.bulk).fetch(later)
    assert torch.equal(tensors["layers.3.qkv"], model()["layers.3.qkv"])
    assert torch.equal(tensors["layers.3.adapters.q_proj.a"], torch.full((2, 256), 4.0))


async def test_a_version_whose_base_is_gone_is_refused(store: Store) -> None:
    base = await stage(store.mesh, store.bulk, JOB, 0, 0, model() | adapters(0))
    manifest, _ = await Fetcher(store.mesh, store.bulk).fetch(base)
    frozen = {t.chunk for t in manifest.tensors if not is_adapter(t.name)}
    for digest in frozen:
        store.chunks.path(digest).unlink()
    with pytest.raises(MeshError, match="is not stored"):
        await stage(store.mesh, store.bulk, JOB, 0, 1, adapters(1), base=manifest)


async def test_nothing_is_kept_of_versions_without_adapters(store: Store) -> None:
    fetcher = Fetcher(store.mesh, store.bulk)
    digest = await stage(store.mesh, store.bulk, JOB, 0, 0, model())
    for fetches in (1, 2):
        await fetcher.fetch(digest)
        assert fetcher.bytes == fetches * MODEL_BYTES
