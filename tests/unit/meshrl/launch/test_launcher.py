"""Mesh of real processes, and the watermark that its launcher records of Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.commands.status import diagnose_run_stalls
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import CorruptData, NotFound, Refused, StateUnavailable
from meshrl.common.base.files import corruption
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.base.host.settings import MESH_TAG_ENV, SETTINGS_ENV, compute_mesh_tag
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.records.checkpoints import format_checkpoint_name
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.state.server_state.rollback import JobWatermark, StateWatermark
from meshrl.common.state.steps import GROUP_ID_GAP
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.launch import leftover_processes
from meshrl.launch.head.job_restore import restore_job
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.launch.redis import redis_note as notes
from meshrl.launch.redis import redis_watchdog
from meshrl.launch.redis.redis_note import RedisNote
from meshrl.launch.redis.redis_progress import RedisProgress
from meshrl.sim.redis.simulated_state import open_simulated_state, open_simulated_state_as
from meshrl.sim.virtual_disk import VirtualDisk
from tests.contract.state.state_bench import JOB, Bench, document
from tests.load import scaled

PATIENCE_S = 60.0


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launcher]:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    launcher = Launcher(MeshPaths(tmp_path), MeshShape(workers=2))
    await launcher.start()
    yield launcher
    await launcher.stop()
    assert leftover_processes.find_leftovers(launcher.mesh_paths.settings.resolve()) == []


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(scaled(PATIENCE_S)):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)


async def equals(found: Awaitable[int], wanted: int) -> bool:
    return await found == wanted


async def lineage(mesh: Launcher) -> int:
    try:
        return (await jobs.read_job(mesh.state, JOB)).lineage
    except (NotFound, StateUnavailable):
        return -1


async def list_live_entries(mesh: Launcher) -> dict[str, RegistryEntry]:
    return {e.name: e for e in await registry.list_entries(mesh.state) if e.alive}


async def await_successor(mesh: Launcher, name: str, incarnation: str) -> RegistryEntry:
    """Return the registry entry of the next incarnation of `name`."""
    async with asyncio.timeout(scaled(PATIENCE_S)):
        while True:
            entry = (await list_live_entries(mesh)).get(name)
            if entry is not None and entry.incarnation != incarnation:
                return entry
            await asyncio.sleep(0.1)


async def await_redis_restart(mesh: Launcher, redis: int) -> bool:
    return read_start_time(redis) == 0 and await redis_watchdog.is_answering(
        mesh.settings.redis_url
    )


async def are_registered(mesh: Launcher, names: set[str]) -> bool:
    return names <= set(await list_live_entries(mesh))


async def await_all(mesh: Launcher, names: set[str]) -> bool:
    return names == set(await list_live_entries(mesh))


@pytest.mark.timeout(240)
@pytest.mark.rotating(2)
async def test_killed_or_stopped_services_are_restarted(mesh: Launcher) -> None:
    before = await list_live_entries(mesh)
    assert {"planner/0", "planner/1", "weights"} <= set(before)
    assert sum(e.kind == "worker" for e in before.values()) == 2
    os.kill(before["weights"].pid, signal.SIGKILL)
    os.kill(before["planner/1"].pid, signal.SIGSTOP)
    assert (await await_successor(mesh, "weights", before["weights"].incarnation)).pid
    assert (await await_successor(mesh, "planner/1", before["planner/1"].incarnation)).pid
    ended = [e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"]
    assert {"weights", "planner/1"} <= {fields["name"] for fields in ended}
    after = await list_live_entries(mesh)
    assert after["planner/0"].incarnation == before["planner/0"].incarnation


@pytest.mark.timeout(240)
async def test_silent_redis_is_named_and_restarted_with_its_data(mesh: Launcher) -> None:
    before = await list_live_entries(mesh)
    (redis,) = [pid for pid, name in mesh.process_names.items() if name == "redis"]
    await events.append(mesh.state, "note", {"text": "kept"})
    os.kill(redis, signal.SIGSTOP)
    (stall,) = (await asyncio.to_thread(diagnose_run_stalls, mesh.mesh_paths))[0]
    assert (stall.waiter, stall.culprit) == ("all processes", "redis")
    await until(lambda: await_redis_restart(mesh, redis))
    assert "note" in {e.kind for e in await events.read_all(mesh.state)}
    await until(lambda: await_all(mesh, set(before)))


@pytest.mark.timeout(240)
async def test_redis_that_loses_state_during_a_start_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    mesh = Launcher(MeshPaths(tmp_path), MeshShape(workers=1))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    write_json(run_dir / "job.json", {"job": JOB, "document": document()})

    async def read_noted_version() -> int:
        return (
            notes.read_note(mesh.mesh_paths.redis_note)
            .watermark.jobs.get(JOB, JobWatermark())
            .version
        )

    async def begin() -> None:
        bench = Bench(mesh.state, None)
        await bench.training_job()
        await mesh.state.run_command("HSET", f"{{{JOB}}}:submission", "run_dir", str(run_dir))
        await until(lambda: equals(read_noted_version(), 0))
        await mesh.state.run_command("HSET", f"{{{JOB}}}:job", "version", -1)
        # the loss is noticed before any service runs
        await asyncio.sleep(2.5 * redis_watchdog.CHECK_INTERVAL_S)

    await mesh.start(begin)
    try:
        await until(lambda: equals(lineage(mesh), 1))
        assert (tmp_path / corruption.QUARANTINE_DIRECTORY / "mesh/redis").is_dir()
        await until(lambda: are_registered(mesh, {"planner/0", "weights"}))
        assert not mesh.failed.is_set()
    finally:
        await mesh.stop()


@pytest.mark.timeout(240)
async def test_failed_start_leaves_no_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    mesh = Launcher(MeshPaths(tmp_path), MeshShape(workers=1))
    left: list[asyncio.subprocess.Process] = []

    async def begin() -> None:
        settings = mesh.mesh_paths.settings.resolve()
        env = {**os.environ, SETTINGS_ENV: str(settings), MESH_TAG_ENV: compute_mesh_tag(settings)}
        left.append(await asyncio.create_subprocess_exec("sleep", "300", env=env))
        raise Refused("no")

    with pytest.raises(Refused):
        await mesh.start(begin)
    try:
        pids = leftover_processes.find_leftovers(mesh.mesh_paths.settings.resolve())
        assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids] == []  # noqa: ASYNC240
    finally:
        if left[0].returncode is None:
            left[0].kill()
        await left[0].wait()


@pytest.mark.timeout(240)
async def test_second_launcher_for_a_directory_is_rejected(mesh: Launcher) -> None:
    with pytest.raises(Refused, match="meshrl down"):
        await Launcher(mesh.mesh_paths, MeshShape(workers=2)).start()
    assert await list_live_entries(mesh)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "mesh"
    made.mkdir()
    return made


@pytest.fixture
def disk(root: Path) -> Iterator[VirtualDisk]:
    made = VirtualDisk(root)
    made.start_tracking()
    yield made
    made.close()


def make_note(**one: int | str) -> RedisNote:
    return RedisNote(StateWatermark("1-0", 7, {JOB: JobWatermark(**one)}))  # type: ignore[arg-type]


class BusyRedis(StateClient):
    """Redis that receives another event while its progress is read."""

    progress: RedisProgress | None = None

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        """Answer a script; append an event before `job_watermarks`, the last script of a poll."""
        if script == "job_watermarks" and self.progress is not None:
            await events.append(self, "note", {})
            self.progress.watermark = StateWatermark(await events.read_last_id(self))
        return await super().run_script(script, keys, *args)


async def test_event_during_a_poll_does_not_look_like_a_rollback(root: Path) -> None:
    progress = RedisProgress(MeshPaths(root))
    state = open_simulated_state_as(BusyRedis, SystemClock())
    assert isinstance(state, BusyRedis)
    await events.append(state, "note", {})
    progress.watermark = StateWatermark(await events.read_last_id(state))
    state.progress = progress
    for records in (True, False):
        found, why = await progress.check_rollback(state, records)
        assert why == "" and found.event != progress.watermark.event
    await state.close()


@pytest.mark.parametrize("seed", range(4))
def test_note_survives_a_power_cut(root: Path, disk: VirtualDisk, seed: int) -> None:
    path = root / "note.json"
    for told in (make_note(lineage=1, version=3), make_note(lineage=1, version=4)):
        notes.write_note(path, told)
        disk.cut_power(Random(seed))
        assert notes.read_note(path) == told


def test_corrupt_note_is_reported_and_ignored(root: Path) -> None:
    path, damaged = root / "note.json", list[Path]()
    notes.write_note(path, make_note(lineage=1, version=3))
    path.write_bytes(path.read_bytes().replace(b"version", b"versipn"))
    assert notes.read_note(path, lambda at, _: damaged.append(at)) == RedisNote() and damaged == [
        path
    ]
    with pytest.raises(CorruptData):
        notes.read_note(path)


async def restore_lineage(run_dir: Path, seen: JobWatermark) -> tuple[int, int]:
    """Return the lineage in which a restored job continues and its next group number."""
    state = open_simulated_state(SystemClock())
    assert await restore_job(state, run_dir, JOB, document(), seen) is None
    row = await jobs.read_job(state, JOB)
    next_group = await state.run_command("HGET", f"{{{JOB}}}:job", "next_group")
    return row.lineage, int(next_group)


async def test_initial_checkpoint_starts_a_new_lineage(
    tmp_path: Path,
) -> None:
    """Check the case of a power cut that removed all records of opened groups."""
    assert await restore_lineage(tmp_path, JobWatermark()) == (0, 0), "nobody has begun"
    assert await restore_lineage(tmp_path, JobWatermark(0, 0)) == (1, GROUP_ID_GAP)
    assert await restore_lineage(tmp_path, JobWatermark(1, 0)) == (2, 2 * GROUP_ID_GAP)
    (tmp_path / "checkpoints").mkdir()
    held = {"lineage": 0, "step": 0, "weights": "ab" * 16}
    name = format_checkpoint_name(0, 0, "ab" * 16)
    (tmp_path / "checkpoints" / f"{name}.json").write_bytes(encode_sealed(held))
    assert await restore_lineage(tmp_path, JobWatermark()) == (1, GROUP_ID_GAP)
    assert await restore_lineage(tmp_path, JobWatermark(2, -1)) == (3, 3 * GROUP_ID_GAP)
