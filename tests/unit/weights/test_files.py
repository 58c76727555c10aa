"""A file by digest: put into the store from one host, and fetched to another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshrl.common.base.errors import Damaged, NotFound
from meshrl.common.weights.store.weight_store import fetch_file, put_file
from tests.unit.weights.storing import Store


async def test_a_file_crosses_hosts_by_its_digest(store: Store, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(content := os.urandom(100_000))
    target = tmp_path / "new" / "target"
    digest = await put_file(store.mesh, store.bulk, source, "a file")
    await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert target.read_bytes() == content
    with pytest.raises(NotFound):
        await fetch_file(store.mesh, store.bulk, "0" * 64, target, "a file")
    assert target.read_bytes() == content


async def test_a_damaged_one_is_set_aside_and_can_be_put_again(
    store: Store, tmp_path: Path
) -> None:
    (source := tmp_path / "source").write_bytes(content := os.urandom(100_000))
    target = tmp_path / "new" / "target"
    digest = await put_file(store.mesh, store.bulk, source, "a file")
    store.chunks.path(digest).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Damaged):
        await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert not store.chunks.has(digest) and not target.exists()
    await put_file(store.mesh, store.bulk, source, "a file")
    await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert target.read_bytes() == content
