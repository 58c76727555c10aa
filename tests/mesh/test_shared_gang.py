"""Two real jobs whose cores share a gang train what each trains alone, despite faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.sharing.gang_sharing import place_beside
from loadtests.sharing.shared_gang import SETTINGS as GANG_SETTINGS
from loadtests.sharing.shared_gang import wait_for_core
from meshrl.client.client import JobHandle
from meshrl.common.api.node import SliceRecord
from meshrl.common.base.files import json_lines
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.pool.demand.role_memory import derive_role_memory
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.owner_mesh import open_owner_mesh
from meshrl.job import job_reader
from meshrl.view.mesh.gang_slices import is_time_sliced, read_gang_slices
from meshrl.view.recording.audit import audit_run
from tests.load import scaled
from tests.mesh.hosts.joined_host import until
from tests.mesh.running import JOB
from tests.unit.node.smallmesh import has_exited

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]
STEPS = 3
WORKERS = 3  # the shared one, and one for the engine of each job
RESIDENT_SHARE = 1.6  # of a core's tensors that the accelerator holds beside what it computes
HOLD_S = 0.2  # a release that was sent before a stop is read by then
SETTINGS: dict[str, Any] = GANG_SETTINGS | {
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 128,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 1,
    "model.config.head_dim": 16,
    "model.config.max_position_embeddings": 64,
    "budget.steps": STEPS,
}
LONG_SLICES = "training.emulate=100/500"  # of a second: a process can be stopped within one
COMPUTING = {"forward_backward", "optim_step"}


def list_words(seed: int) -> list[str]:
    """Return the overrides of a job with this seed."""
    return [f"{key}={value}" for key, value in (SETTINGS | {"seed": seed}).items()]


def compute_budget() -> int:
    """Return the accelerator bytes of a worker on which not all tensors of two cores fit."""
    config, _ = job_reader.load_config(JOB, list_words(0))
    memory = derive_role_memory(config.to_document())
    resident_bytes = 2 * memory.core_state - memory.core_moments  # gradients are as the parameters
    working_bytes = max(memory.core_pass, memory.core_update) - resident_bytes
    return round(RESIDENT_SHARE * resident_bytes + working_bytes)


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningMesh]:
    """Provide a mesh of three workers with small accelerators."""
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    monkeypatch.setenv("MESHRL_ACCELERATOR_BYTES", str(compute_budget()))
    async with mesh_up(tmp_path, WORKERS) as running:
        yield running


async def start_pair(mesh: RunningMesh, name: str, *words: str) -> list[JobHandle]:
    """Start two jobs, the second with its core beside that of the first."""
    first = await mesh.submit(JOB, f"{name}0", *list_words(0), *words)
    await wait_for_core(mesh, first.name)
    second = await mesh.submit(JOB, f"{name}1", *list_words(1), *words)
    decision = await place_beside(mesh, second.name, first.name)
    assert decision.startswith(f"{second.name} will share the gang of {first.name}")
    return [first, second]


async def finish(mesh: RunningMesh, handles: list[JobHandle]) -> list[list[str]]:
    """Return the identities of all versions of each job once they have finished and are right."""
    summaries = await asyncio.gather(*map(mesh.finished, handles))
    for handle, summary in zip(handles, summaries, strict=True):
        account = audit_run(mesh.root / handle.name)
        assert (account["lost"], account["trained_twice"]) == (0, 0), account
        assert (summary["steps"], summary["lost"], summary["trained_twice"]) == (STEPS, 0, 0)
        if len(handles) > 1:
            assert summary["slices"]["hidden_share"] is not None, "no kind of tensors has moved"
    return [read_images(mesh, handle.name) for handle in handles]


def read_images(mesh: RunningMesh, job: str) -> list[str]:
    """Return the identities of the weights after each step, which depend on each bit of them."""
    rows = json_lines.iterate_rows(mesh.root / job / "metrics.jsonl")
    return [f"{row['image']} {row['masters']}" for row in rows]


async def read_slices(mesh: RunningMesh, own: Mesh, job: str) -> list[SliceRecord]:
    """Return the slices of a job's core on the shared gang."""
    for gang in await pool.read_gangs(mesh.state):
        cores = [one.id for one in gang.instances if one.core and one.job == job]
        if cores and is_time_sliced(gang):
            found = await read_gang_slices(own, gang)
            return [one for one in found.slices if one.instance in cores]
    return []


async def stop_holder(mesh: RunningMesh, own: Mesh, job: str) -> tuple[int, int]:
    """Stop the core of a job within a slice; return the slice's number and the process id."""

    async def find_running() -> SliceRecord | None:
        slices = await read_slices(mesh, own, job)
        return next((one for one in slices if not one.end and one.function in COMPUTING), None)

    while True:
        held = await until(f"a slice of {job}", find_running)
        entry = await registry.lookup(mesh.state, f"trainer/{job}")
        assert entry is not None
        os.kill(entry.pid, signal.SIGSTOP)
        await asyncio.sleep(scaled(HOLD_S))
        running = [one for one in await read_slices(mesh, own, job) if not one.end]
        if [one.number for one in running] == [held.number]:
            return held.number, entry.pid
        os.kill(entry.pid, signal.SIGCONT)


async def hurt_holder(
    mesh: RunningMesh, own: Mesh, job: str, other: str, fault: signal.Signals
) -> None:
    """Hurt the core of a job within a slice, and wait until the other job has one.

    A stopped process is killed when its lease in the registry has ended.
    """
    number, pid = await stop_holder(mesh, own, job)
    os.kill(pid, fault)

    async def find_next() -> SliceRecord | None:
        [held] = [one for one in await read_slices(mesh, own, job) if one.number == number]
        if not held.end:
            return None
        assert held.end in ("lost", "killed")
        later = await read_slices(mesh, own, other)
        return next((one for one in later if one.granted_s >= held.ended_s), None)

    await until(f"a slice of {other}", find_next)
    assert await has_exited(pid), "its memory is free"


async def test_jobs_on_one_gang_train_what_each_trains_alone_although_cores_die_or_hang(
    mesh: RunningMesh,
) -> None:
    alone = []
    for seed in range(2):
        alone += await finish(mesh, [await mesh.submit(JOB, f"alone{seed}", *list_words(seed))])
    assert all(len(set(images)) == STEPS for images in alone) and alone[0] != alone[1]
    assert await finish(mesh, await start_pair(mesh, "shared")) == alone

    handles = await start_pair(mesh, "hurt", LONG_SLICES)
    first, second = (handle.name for handle in handles)
    async with open_owner_mesh(MeshPaths(mesh.root)) as own:
        await hurt_holder(mesh, own, second, first, signal.SIGSTOP)
        await hurt_holder(mesh, own, first, second, signal.SIGKILL)
    assert await finish(mesh, handles) == alone
