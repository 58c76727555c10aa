"""A mesh of real processes, and what its launcher notes of its Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.commands.status import diagnosed
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Damaged, NotFound, Refused, StateUnavailable
from meshrl.common.base.files import damage
from meshrl.common.base.files.sealed import sealed
from meshrl.common.base.host.settings import MESH_ENV, SETTINGS_ENV, mark_of
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.handle import start_time
from meshrl.common.records.checkpoints import checkpoint_name
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.redis.client import State
from meshrl.common.state.registry import Entry
from meshrl.common.state.server.rollback import JobMark, RollbackMark
from meshrl.common.state.steps import IDS_APART
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch import leftovers
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.restoring import put_back
from meshrl.launch.head.shape import MeshShape
from meshrl.launch.redis import guard
from meshrl.launch.redis import note as notes
from meshrl.launch.redis.note import Note
from meshrl.launch.redis.progress import RedisProgress
from meshrl.sim.disk import Disk
from meshrl.sim.redis.state import simulated_as, simulated_state
from tests.contract.state.state_bench import JOB, Bench, document
from tests.load import scaled

PATIENCE_S = 60.0


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launcher]:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    launcher = Launcher(MeshPlace(tmp_path), MeshShape(workers=2))
    await launcher.start()
    yield launcher
    await launcher.stop()
    assert leftovers.belonging_to(launcher.place.settings.resolve()) == []


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(scaled(PATIENCE_S)):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)


async def is_(found: Awaitable[int], wanted: int) -> bool:
    return await found == wanted


async def lineage(mesh: Launcher) -> int:
    try:
        return (await jobs.job(mesh.state, JOB)).lineage
    except (NotFound, StateUnavailable):
        return -1


async def alive(mesh: Launcher) -> dict[str, Entry]:
    return {e.name: e for e in await registry.entries(mesh.state) if e.alive}


async def replaced(mesh: Launcher, name: str, incarnation: str) -> Entry:
    """The entry of the next incarnation of `name`."""
    async with asyncio.timeout(scaled(PATIENCE_S)):
        while True:
            entry = (await alive(mesh)).get(name)
            if entry is not None and entry.incarnation != incarnation:
                return entry
            await asyncio.sleep(0.1)


async def restarted(mesh: Launcher, redis: int) -> bool:
    return start_time(redis) == 0 and await guard.answers(mesh.settings.redis_url)


async def registered(mesh: Launcher, names: set[str]) -> bool:
    return names <= set(await alive(mesh))


async def all_back(mesh: Launcher, names: set[str]) -> bool:
    return names == set(await alive(mesh))


@pytest.mark.timeout(240)
@pytest.mark.rotating(2)
async def test_services_that_die_or_stop_come_back(mesh: Launcher) -> None:
    before = await alive(mesh)
    assert {"planner/0", "planner/1", "weights"} <= set(before)
    assert sum(e.kind == "worker" for e in before.values()) == 2
    os.kill(before["weights"].pid, signal.SIGKILL)
    os.kill(before["planner/1"].pid, signal.SIGSTOP)
    assert (await replaced(mesh, "weights", before["weights"].incarnation)).pid
    assert (await replaced(mesh, "planner/1", before["planner/1"].incarnation)).pid
    ended = [e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"]
    assert {"weights", "planner/1"} <= {fields["name"] for fields in ended}
    after = await alive(mesh)
    assert after["planner/0"].incarnation == before["planner/0"].incarnation


@pytest.mark.timeout(240)
async def test_a_silent_redis_is_named_and_restarted_with_its_data(mesh: Launcher) -> None:
    before = await alive(mesh)
    (redis,) = [pid for pid, name in mesh.pids.items() if name == "redis"]
    await events.append(mesh.state, "note", {"text": "kept"})
    os.kill(redis, signal.SIGSTOP)
    (stall,) = (await asyncio.to_thread(diagnosed, mesh.place))[0]
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")
    await until(lambda: restarted(mesh, redis))
    assert "note" in {e.kind for e in await events.read_all(mesh.state)}
    await until(lambda: all_back(mesh, set(before)))


@pytest.mark.timeout(240)
async def test_a_redis_that_goes_back_while_the_mesh_starts_is_begun_anew_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    mesh = Launcher(MeshPlace(tmp_path), MeshShape(workers=1))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    write_json(run_dir / "job.json", {"job": JOB, "document": document()})

    async def noted() -> int:
        return notes.read(mesh.place.redis_note).mark.jobs.get(JOB, JobMark()).version

    async def begin() -> None:
        bench = Bench(mesh.state, None)
        await bench.training_job()
        await mesh.state.command("HSET", f"{{{JOB}}}:given", "run_dir", str(run_dir))
        await until(lambda: is_(noted(), 0))
        await mesh.state.command("HSET", f"{{{JOB}}}:job", "version", -1)
        await asyncio.sleep(2.5 * guard.INTERVAL_S)  # it is noticed before there are services

    await mesh.start(begin)
    try:
        await until(lambda: is_(lineage(mesh), 1))
        assert (tmp_path / damage.QUARANTINE / "mesh/redis").is_dir()
        await until(lambda: registered(mesh, {"planner/0", "weights"}))
        assert not mesh.failed.is_set()
    finally:
        await mesh.stop()


@pytest.mark.timeout(240)
async def test_a_start_that_fails_leaves_nothing_that_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    mesh = Launcher(MeshPlace(tmp_path), MeshShape(workers=1))
    left: list[asyncio.subprocess.Process] = []

    async def begin() -> None:
        settings = mesh.place.settings.resolve()
        env = {**os.environ, SETTINGS_ENV: str(settings), MESH_ENV: mark_of(settings)}
        left.append(await asyncio.create_subprocess_exec("sleep", "300", env=env))
        raise Refused("no")

    with pytest.raises(Refused):
        await mesh.start(begin)
    try:
        pids = leftovers.belonging_to(mesh.place.settings.resolve())
        assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids] == []  # noqa: ASYNC240
    finally:
        if left[0].returncode is None:
            left[0].kill()
        await left[0].wait()


@pytest.mark.timeout(240)
async def test_a_second_launcher_in_one_place_is_refused(mesh: Launcher) -> None:
    with pytest.raises(Refused, match="meshrl down"):
        await Launcher(mesh.place, MeshShape(workers=2)).start()
    assert await alive(mesh)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "mesh"
    made.mkdir()
    return made


@pytest.fixture
def disk(root: Path) -> Iterator[Disk]:
    made = Disk(root)
    made.watch()
    yield made
    made.close()


def note_of(**one: int | str) -> Note:
    return Note(RollbackMark("1-0", 7, {JOB: JobMark(**one)}))  # type: ignore[arg-type]


class Busy(State):
    """A Redis in which an event comes, and becomes known, while it is being looked at."""

    progress: RedisProgress | None = None

    async def run(self, script: str, keys: list[str], *args: Any) -> Any:
        """Answer a script; before `job_marks`, which ends a look, another event comes."""
        if script == "job_marks" and self.progress is not None:
            await events.append(self, "note", {})
            self.progress.known = RollbackMark(await events.last_id(self))
        return await super().run(script, keys, *args)


async def test_an_event_that_comes_during_a_look_does_not_make_redis_look_older(root: Path) -> None:
    progress = RedisProgress(MeshPlace(root))
    state = simulated_as(Busy, SystemClock())
    assert isinstance(state, Busy)
    await events.append(state, "note", {})
    progress.known = RollbackMark(await events.last_id(state))
    state.progress = progress
    for records in (True, False):
        found, why = await progress.look_back(state, records)
        assert why == "" and found.event != progress.known.event
    await state.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_note_outlives_a_power_cut(root: Path, disk: Disk, seed: int) -> None:
    path = root / "note.json"
    for told in (note_of(lineage=1, version=3), note_of(lineage=1, version=4)):
        notes.write(path, told)
        disk.cut(Random(seed))
        assert notes.read(path) == told


def test_a_damaged_note_is_told_and_tells_nothing(root: Path) -> None:
    path, damaged = root / "note.json", list[Path]()
    notes.write(path, note_of(lineage=1, version=3))
    path.write_bytes(path.read_bytes().replace(b"version", b"versipn"))
    assert notes.read(path, lambda at, _: damaged.append(at)) == Note() and damaged == [path]
    with pytest.raises(Damaged):
        notes.read(path)


async def put_back_lineage(run_dir: Path, seen: JobMark) -> tuple[int, int]:
    """The lineage in which a job goes on, and the number of its next group."""
    state = simulated_state(SystemClock())
    assert await put_back(state, run_dir, JOB, document(), seen) is None
    row = await jobs.job(state, JOB)
    next_group = await state.command("HGET", f"{{{JOB}}}:job", "next_group")
    return row.lineage, int(next_group)


async def test_the_checkpoint_before_the_first_step_is_enough_for_a_lineage_of_its_own(
    tmp_path: Path,
) -> None:
    """All that told of groups went with a power cut; they may have been opened all the same."""
    assert await put_back_lineage(tmp_path, JobMark()) == (0, 0), "nobody has begun"
    assert await put_back_lineage(tmp_path, JobMark(0, 0)) == (1, IDS_APART)
    assert await put_back_lineage(tmp_path, JobMark(1, 0)) == (2, 2 * IDS_APART)
    (tmp_path / "checkpoints").mkdir()
    held = {"lineage": 0, "step": 0, "weights": "ab" * 16}
    name = checkpoint_name(0, 0, "ab" * 16)
    (tmp_path / "checkpoints" / f"{name}.json").write_bytes(sealed(held))
    assert await put_back_lineage(tmp_path, JobMark()) == (1, IDS_APART)
    assert await put_back_lineage(tmp_path, JobMark(2, -1)) == (3, 3 * IDS_APART)
