"""GPUs of a host: visibility, health, and instances whose GPU is filled by other processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import JobConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.state import jobs, registry
from meshrl.common.state.pool.demand.role_memory import derive_role_memory
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import InstancePhase
from meshrl.view.live import mesh_tables
from meshrl.view.mesh import gpu_status
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot, read_mesh_snapshot
from tests.gpus.driver import GIB, LOST, Gpus
from tests.load import scaled
from tests.unit.node.smallmesh import POLL_S, SOON_S, SmallMesh

pytestmark = pytest.mark.needs("compiler")
A, B, M = "GPU-aaaa", "GPU-bbbb", "MIG-cccc"
MODEL = ModelConfig("qwen3", 65_536, 2048, 16, 16, 8, 128, 6144)  # 970 million parameters


def read_environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.deep
async def test_role_process_sees_its_workers_device_and_a_full_device_is_refused(
    mesh: SmallMesh, gpus: Gpus
) -> None:
    gpus.gpu(A, used=80 * GIB - 1000)
    gpus.process(A, os.getpid(), 79 * GIB)
    gpus.gpu(B, mig=1)
    gpus.instance(B, M, 7)
    mesh.start_agent("--device", "cuda", workers=2, env=gpus.environment)
    await mesh.form("w0")
    await mesh.form("w1", gang="g1")
    rows = {row.id: row for row in await pool.read_workers(mesh.state)}
    assert (rows["w0"].uuid, rows["w0"].accelerator) == (A, "cuda:0 NVIDIA H100")
    assert (rows["w1"].uuid, rows["w1"].budget.accelerator) == (M, 10 * GIB)
    document = JobConfig.from_document({"name": "j"}).to_document()
    document |= {"bundle": {"dir": str(mesh.directory), "models": {"trained": MODEL.to_hf()}}}
    await jobs.submit(mesh.state, "j", document, str(mesh.directory), "j")
    await mesh.place("g0.0")
    await mesh.place("g1.0")
    await mesh.until_settled("g1.0")
    seen = read_environment(await mesh.await_pid("engine/g1.0"))
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["MESHRL_DEVICE"]) == (M, "cuda")
    refused = await mesh.until("failed", "g0.0", lambda r: r.phase == InstancePhase.FAILED)
    for words in (
        f"engine/g0.0 needs {derive_role_memory(document, 'cuda').engines[1]} bytes of GPU "
        "GPU-aaaa, which has 1000 free",
        f"process {os.getpid()} (",
        f"uses {79 * GIB} bytes",
    ):
        assert words in refused.detail
    gpus.gpu(A, used=0)
    await mesh.until_settled("g0.0")  # the start is retried


@pytest.mark.deep
async def test_engine_on_two_gpus_waits_until_the_second_has_free_memory(
    mesh: SmallMesh, gpus: Gpus
) -> None:
    gpus.gpu(A)
    gpus.gpu(B, used=80 * GIB - 1000)
    mesh.start_agent("--device", "cuda", workers=2, env=gpus.environment)
    await mesh.form("w0", "w1")
    rollout = {"tensor_parallel": [2]}
    document = JobConfig.from_document({"name": "j", "rollout": rollout}).to_document()
    document |= {"bundle": {"dir": str(mesh.directory), "models": {"trained": MODEL.to_hf()}}}
    await jobs.submit(mesh.state, "j", document, str(mesh.directory), "j")
    await mesh.place("g0.0", ranks=(0, 1))
    refused = await mesh.until("failed", "g0.0", lambda r: r.phase == InstancePhase.FAILED)
    needed_bytes = derive_role_memory(document, "cuda").engines[2]
    assert f"engine/g0.0/1 needs {needed_bytes} bytes of GPU GPU-bbbb" in refused.detail
    waits = "waiting for w1 to reserve accelerators"
    await mesh.until("awaiting", "g0.0", lambda r: 0 in r.reports and r.reports[0].detail == waits)
    gpus.gpu(B, used=0)
    found = await mesh.until_settled("g0.0")
    assert found.reports[1].usage.accelerator == needed_bytes
    seen = read_environment(await mesh.await_pid("engine/g0.0"))
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["MESHRL_DEVICE"]) == (f"{A},{B}", "cuda")

    gpus.gpu(B, used=80 * GIB - 1000)  # the engine reloads itself when w1 is back
    worker, token = await mesh.await_pid("worker/w1"), found.reports[1].token
    os.kill(worker, signal.SIGKILL)
    await mesh.until("kept", "g0.0", lambda r: r.is_reconciled and r.reports[1].token != token)


@pytest.mark.rotating(3)
async def test_gpu_figures_are_published_and_faults_become_events(
    mesh: SmallMesh, gpus: Gpus
) -> None:
    gpus.gpu(A, used=40 * GIB, busy=97, celsius=71, milliwatts=650_000, throttle=0x20)
    mesh.start_agent("--device", "cuda", env=gpus.environment)
    await mesh.form("w0")
    found = await await_gpu_figure(mesh, "used_bytes", 40 * GIB)
    assert found["utilization"] == 0.97 and found["lost"] == 0 and found["throttled"] == 1
    assert gpu_status.format_gpu(found) == "40 of 80 GiB, 97%, 71 °C, 650 W, throttled by thermal"
    gpus.gpu(A, ecc=2)
    gpus.xid(A, 48)
    [event] = await mesh.await_events("gpu", 1)
    assert (event["worker"], event["what"]) == ("w0", "errors")
    assert "2 uncorrected memory errors and XID 48" in gpu_status.format_gpu_event(event)
    gpus.fail(A, LOST)
    lost = (await mesh.await_events("gpu", 2))[1]
    assert lost[
        "what"
    ] == "lost" and "cuda:0 NVIDIA H100 of w0 (GPU-aaaa) is lost" in gpu_status.format_gpu_event(
        lost
    )
    assert gpu_status.format_gpu(await await_gpu_figure(mesh, "lost", 1)) == "GPU lost"
    lost_now = gpu_status.list_gpu_problems(await read_mesh_snapshot(mesh.state))
    assert lost_now == ["cuda:0 NVIDIA H100 of w0 (GPU-aaaa) is lost"]
    gpus.clear()
    assert (await mesh.await_events("gpu", 3))[2]["what"] == "back"


async def await_gpu_figure(mesh: SmallMesh, name: str, value: object) -> dict[str, Any]:
    """Wait for a figure of w0's GPU and return all of them as `meshrl workers --json` prints
    them.
    """
    for _ in range(int(scaled(SOON_S) / POLL_S)):
        entries = await registry.list_entries(mesh.state)
        rows = await pool.read_workers(mesh.state)
        [worker] = mesh_tables.to_document(MeshSnapshot(tuple(rows), entries=entries))["workers"]
        if (found := worker.get("gpu", {})).get(name) == value:
            return dict(found)
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"{name} is not {value}: {worker}\n{mesh.logs()}")
