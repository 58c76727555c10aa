"""`meshrl.Client` on a running mesh: requests, answers and errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl import Client
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    NotFound,
    Refused,
    StateUnavailable,
)
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.state import events, jobs
from meshrl.common.state.pool.demand.role_memory import derive_role_memory
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import TierBytes, WorkerRow
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX
from meshrl.common.state.registry import RegistryEntry, register
from meshrl.job import job_reader
from tests.load import scaled
from tests.unit.meshrl.runs.conftest import JOB, HeldMesh


async def test_job_is_submitted_followed_and_stopped_from_any_directory(
    held_mesh: HeldMesh, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    async with Client(held_mesh.root) as client:
        handle = await client.submit(job, ["budget.steps=3", 'name="mine"'])
        assert Path(handle.run_dir) == tmp_path / "elsewhere/runs/mine"
        state = await handle.state()
        assert (state.name, state.phase, state.steps, state.over) == ("mine", "queued", 3, False)
        assert [one.name for one in await client.jobs()] == [JOB, "mine"]
        seen = []
        async for event in handle.events():
            seen.append((event.kind, event.fields.get("phase")))
            if event.kind == "submitted":
                assert await handle.stop()
        assert seen == [("submitted", None), ("phase", "stopped")]
        assert (await handle.wait(scaled(5.0))).over
        assert not await handle.stop()  # it was already terminal
        with pytest.raises(Refused):
            await client.delete(JOB)  # a live job
        await handle.delete()
        assert [one.name for one in await client.jobs()] == [JOB]
        assert (tmp_path / "elsewhere/runs/mine/job.json").is_file()
        with pytest.raises(NotFound):
            await handle.delete()


async def test_job_larger_than_any_accelerator_is_rejected_before_writing_files(
    held_mesh: HeldMesh, job: Path, tmp_path: Path
) -> None:
    out = tmp_path / "large"
    config = job_reader.read_job_file(job, []).config
    room_bytes = derive_role_memory(config.to_document()).core
    state = await StateClient.open(held_mesh.url)
    try:
        token = await register(state, RegistryEntry("worker/w0", "worker"), 60_000)
        await pool.join_worker(
            state, WorkerRow("w0", "a", "cpu:0", token, budget=TierBytes(room_bytes))
        )
        token = await register(state, RegistryEntry("worker/w1", "worker"), 60_000)
        await pool.join_worker(
            state, WorkerRow("w1", "a", "cpu:0", token, budget=TierBytes(room_bytes))
        )
    finally:
        await state.close()
    async with Client(held_mesh.root) as client:
        with pytest.raises(Refused, match=r"core needs at least .*largest accelerator") as raised:
            many = "training.bin_tokens=99999", "algorithm.groups_per_step=1000"
            await client.submit(job, [f'out="{out}"', *many])
        assert "training.bin_tokens = " in raised.value.fix
        assert not out.exists()
        await client.submit(job, [f'out="{out}"'])


async def test_job_can_be_defined_in_code(held_mesh: HeldMesh, job: Path, tmp_path: Path) -> None:
    config = job_reader.read_job_file(job, []).config
    async with Client(held_mesh.root) as client:
        out = f'out="{tmp_path / "out"}"'
        handle = await client.submit(config, [out, "seed=7"], base=job.parent)
        assert handle.run_dir == str(tmp_path / "out")
        with pytest.raises(ConfigError, match=r"budget\.steps"):
            await client.submit(config, ["budget.steps=-1"], base=job.parent)


async def test_missing_and_live_jobs_raise_typed_errors(held_mesh: HeldMesh) -> None:
    async with Client(held_mesh.root) as client:
        with pytest.raises(NotFound, match="no job other"):
            await client.job("other")
        with pytest.raises(NotFound):
            async for _ in client.events("other"):
                pass
        with pytest.raises(DeadlineExceeded, match=r"end of tiny took more than 0\.1 s"):
            await client.wait(JOB, timeout_s=0.1)


async def test_requested_move_returns_its_verdict(held_mesh: HeldMesh) -> None:
    state = await StateClient.open(held_mesh.url)

    async def publish_verdict(kind: str, **told: str) -> None:
        """Publish the planner's verdict on the next request as an event."""
        while not (asked := await state.run_command("HKEYS", f"{MESH_PREFIX}:requests")):
            await asyncio.sleep(0.02)
        await events.append(state, kind, {"op": asked[0], **told})
        await state.run_command("DEL", f"{MESH_PREFIX}:requests")

    try:
        lease = RegistryEntry(
            "worker/w0", "worker", incarnation="one", run_root=str(held_mesh.root)
        )
        token = await register(state, lease, 60_000)
        await pool.join_worker(state, WorkerRow("w0", "here", "cpu:0", token))
        async with Client(held_mesh.root) as client:
            assert [worker.id for worker in (await client.workers()).workers] == ["w0"]
            with pytest.raises(NotFound, match="Choose one of: w0"):
                await client.move("w7", "training")
            with pytest.raises(Refused, match="is not a role"):
                await client.move("w0", "sleeping")
            async with asyncio.TaskGroup() as group:
                group.create_task(publish_verdict("desired", gang="g0", role="training"))
                said = group.create_task(client.move("worker/w0", "training", JOB))
            assert "w0 will take the role training" in said.result()
            declined = asyncio.create_task(
                publish_verdict("move_declined", reason="the core stays")
            )
            with pytest.raises(Refused, match="the core stays"):
                await client.move("w0", "idle")
            await declined
    finally:
        await state.close()


async def test_requested_place_returns_its_verdict(held_mesh: HeldMesh) -> None:
    state = await StateClient.open(held_mesh.url)
    requests: list[dict[str, str]] = []

    async def publish_verdict(kind: str, **told: str) -> None:
        while not (asked := await state.run_command("HGETALL", f"{MESH_PREFIX}:requests")):
            await asyncio.sleep(0.02)
        [[op, text]] = [*dict(asked).items()] if isinstance(asked, dict) else [asked]
        requests.append(json.loads(text))
        await events.append(state, kind, {"op": op, **told})
        await state.run_command("DEL", f"{MESH_PREFIX}:requests")

    try:
        async with Client(held_mesh.root) as client:
            with pytest.raises(NotFound, match="no job other"):
                await client.place(JOB, "other")
            async with asyncio.TaskGroup() as group:
                group.create_task(publish_verdict("place_settled"))
                answer = group.create_task(client.place(JOB))
            assert "workers of its own" in answer.result()
            rejection = asyncio.create_task(
                publish_verdict("place_declined", reason="they do not fit")
            )
            with pytest.raises(Refused, match="they do not fit"):
                await client.place(JOB, JOB)
            await rejection
        assert [one["partner"] for one in requests] == ["", JOB]
    finally:
        await state.close()


async def test_event_stream_survives_a_redis_outage(held_mesh: HeldMesh) -> None:
    socket = held_mesh.url.removeprefix("unix://").partition("?")[0]

    async def collect_kinds() -> list[str]:
        return [event.kind async for event in client.events(JOB)]

    state = await StateClient.open(held_mesh.url)
    async with Client(held_mesh.root) as client:
        following: list[asyncio.Task[Any]] = [
            asyncio.create_task(client.wait(JOB)),
            asyncio.create_task(collect_kinds()),
        ]
        await client.jobs()
        # no new connections are possible, and the open ones are closed
        os.rename(socket, f"{socket}.aside")
        await state.run_command("CLIENT", "KILL", "TYPE", "normal")
        for _ in range(2):  # each outage lasts as long as any request during it
            with pytest.raises(StateUnavailable):
                await client.jobs()
        assert not any(task.done() for task in following)
        os.rename(f"{socket}.aside", socket)
        await jobs.cancel(state, JOB, "stop")
        waited, seen = await asyncio.wait_for(asyncio.gather(*following), scaled(30))
        assert waited.over and seen[-1] == "phase"
    await state.close()


async def test_unreachable_mesh_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "mesh").mkdir()
    settings = MeshSettings(redis_url=f"unix://{tmp_path}/none", run_root=str(tmp_path))
    settings.to_file(tmp_path / "mesh/settings.json")
    with pytest.raises((StateUnavailable, DeadlineExceeded)):
        async with Client(tmp_path):
            raise AssertionError("it was opened")


def test_importing_the_package_loads_no_client_dependencies() -> None:
    code = "import sys, meshrl; sys.exit('redis' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))
