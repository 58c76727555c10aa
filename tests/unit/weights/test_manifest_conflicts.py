"""Unique manifest of a committed version of a lineage, whatever Redis reports later."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest

from meshrl.common.api.weights import STORE_NAME, Manifest, TensorPiece, Weights
from meshrl.common.base.errors import AlreadyCommitted
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state import jobs, steps
from meshrl.common.state.redis.client import StateClient
from meshrl.services.weights.retention.job_records import JobRecords
from meshrl.services.weights.retention.policy import VersionNumber
from tests.contract.state.state_bench import JOB, TRAINER, Bench, document
from tests.unit.weights.store_processes import Store


def version(store: Store, number: int, fill: int, lineage: int = 0) -> Manifest:
    """Store a chunk of `fill` bytes and return a manifest of it."""
    content = np.full(8, fill, np.uint8).tobytes()
    chunk = store.chunks.write(content)
    return Manifest(JOB, lineage, number, [TensorPiece("w", "U8", [8], chunk, 0, 8, 0, 0, 8)])


async def stage(store: Store, request: Manifest) -> str:
    digest: str = await store.mesh.ref(STORE_NAME).call(Weights.stage_version, request)
    return digest


async def commit_initial(state: StateClient, manifest: str) -> None:
    """Record in Redis a job whose version 0 has this manifest."""
    token = await Bench(state, None).seat(TRAINER)
    await jobs.submit(state, JOB, document(), "/runs/job", uuid.uuid4().hex)
    await steps.commit_initial(
        state, JOB, TRAINER, token, 0, steps.VersionReferences(manifest, "c0")
    )


async def test_second_manifest_of_a_committed_version_is_rejected(store: Store) -> None:
    state = store.mesh.state
    first = await stage(store, version(store, 0, 1))
    await commit_initial(state, first)
    assert await stage(store, version(store, 0, 1)) == first
    with pytest.raises(AlreadyCommitted, match=first):
        await stage(store, version(store, 0, 2))
    await stage(store, version(store, 0, 2, lineage=1))


async def test_uncommitted_version_may_be_staged_again(store: Store) -> None:
    await commit_initial(store.mesh.state, await stage(store, version(store, 0, 1)))
    assert await stage(store, version(store, 1, 2)) != await stage(store, version(store, 1, 3))


async def test_second_manifest_is_rejected_after_a_rollback_of_redis(store: Store) -> None:
    first = await stage(store, version(store, 0, 1))
    await commit_initial(store.mesh.state, first)
    await stage(store, version(store, 1, 2))
    await store.mesh.state.run_command("DEL", f"{{{JOB}}}:job")
    with pytest.raises(AlreadyCommitted, match=first):
        await stage(store, version(store, 0, 3))


async def test_commit_is_on_record_after_a_restart(store: Store, tmp_path: Path) -> None:
    first = await stage(store, version(store, 0, 1))
    await commit_initial(store.mesh.state, first)
    await stage(store, version(store, 1, 2))
    shutil.copytree(store.chunks.directory / "jobs", tmp_path / "copy")
    records = JobRecords(SystemHost(), tmp_path / "copy")
    assert await records.load() == []
    assert records.get_or_create(JOB).find_conflict(VersionNumber(0, 0), "other") == first
