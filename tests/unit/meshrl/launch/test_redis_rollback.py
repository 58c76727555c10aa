"""Redis of a mesh that returns unchanged, with older state, corrupt, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, Fenced, StateUnavailable
from meshrl.common.base.files import corruption
from meshrl.common.base.files.documents import temporary_path
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.supervisor import ChildSpec, SupervisorHooks
from meshrl.common.state import events, jobs, steps
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state import rollback
from meshrl.common.state.server_state.state_format import FORMAT_KEY
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.launch.head.job_restore import restore_all_jobs
from meshrl.launch.redis import redis_note as notes
from meshrl.launch.redis.mesh_redis import MeshRedis
from tests.contract.state.state_bench import (
    JOB,
    SHARD,
    TRAINER,
    Bench,
    Seats,
    document,
    running_server,
)
from tests.load import scaled

BUDGET = (20, 120.0)
SECRETS = ("5e" * 32, "c7" * 32)
WITHIN_S = 30.0


class FailingClock(SystemClock):
    fails = False

    async def sleep(self, seconds: float) -> None:
        if self.fails:
            raise RuntimeError("no timer is left")
        await super().sleep(seconds)


class Owner(SupervisorHooks):
    """Owner that records that Redis was given up."""

    def __init__(self) -> None:
        self.gave, self.failed = "", asyncio.Event()

    async def on_give_up(self, spec: ChildSpec, why: str) -> None:
        self.gave = f"{spec.name}: {why}"

    async def on_critical_loss(self, name: str) -> None:
        self.failed.set()


class Mesh:
    """Mesh that consists of its Redis, which restarts in one directory."""

    def __init__(self, root: Path) -> None:
        self.place = MeshPaths(root)
        self.starts = 0
        self.clock, self.owner = FailingClock(), Owner()
        self.back = asyncio.Event()  # set when the state rolled back during the run
        self.why = ""
        self.redis: MeshRedis
        self.bench: Bench

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Bench]:
        secret, self.starts = SECRETS[self.starts % 2], self.starts + 1
        args = SystemHost(), self.clock, self.place, secret, BUDGET, self.owner, self._on_rollback
        self.redis = MeshRedis(*args)
        self.place.directory.mkdir(exist_ok=True)
        try:
            await self.redis.connect()
            await self.redis.open_to_mesh()
            self.bench = Bench(await StateClient.open(self.redis.url), None)
            yield self.bench
            await self.bench.state.close()
        finally:
            await self.redis.stop()

    def _on_rollback(self, why: str) -> None:
        self.why = why
        self.back.set()

    @property
    def file(self) -> Path:
        return self.place.redis_directory / "appendonlydir/appendonly.aof.1.incr.aof"

    def kill(self) -> None:
        """Kill the server, which restarts after a moment."""
        assert self.redis.supervisor is not None
        self.redis.supervisor.children["redis"].kill()

    async def await_noted_version(self, version: int) -> None:
        """Wait until the launcher has recorded this version."""
        async with asyncio.timeout(scaled(WITHIN_S)):
            while self.redis.watermark.jobs.get(JOB, rollback.JobWatermark()).version < version:
                await asyncio.sleep(0.02)

    async def await_server(self, bench: Bench) -> None:
        """Wait until a killed server is used again."""
        async with asyncio.timeout(scaled(WITHIN_S)):
            while not self.back.is_set():
                with contextlib.suppress(StateUnavailable):
                    await jobs.read_jobs(bench.state)
                    return

    async def await_noted_file(self) -> None:
        """Wait until the launcher has recorded the whole content of the file."""
        size = self.file.stat().st_size
        async with asyncio.timeout(scaled(WITHIN_S)):
            while True:
                files = notes.read_note(self.place.redis_note).file_extents
                if self.file.name in files and files[self.file.name].length_bytes >= size:
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    root = Path(tempfile.mkdtemp(prefix="mesh-"))  # a short path, because it contains a socket
    yield Mesh(root)
    shutil.rmtree(root)


async def train(bench: Bench, seats: Seats, *numbers: int) -> None:
    for number in numbers:
        for group in await seats.admit(2):
            await seats.finish(group)
        await seats.step(number)


def remove_transactions(file: Path, commands: int) -> None:
    """Remove the last transactions from an append-only file, as if they had never been written."""
    held = file.read_bytes()
    for _ in range(commands):
        held = held[: held.rindex(b"*1\r\n$5\r\nMULTI\r\n")]
    file.write_bytes(held)


def flip(file: Path, at: int) -> None:
    held = bytearray(file.read_bytes())
    held[at] ^= 1
    file.write_bytes(held)


def copy_state(mesh: Mesh) -> None:
    shutil.rmtree(mesh.place.redis_directory)
    shutil.copytree(mesh.place.root / "copy", mesh.place.redis_directory)


DAMAGE: dict[str, Callable[[Mesh], object]] = {
    "cut off at the end of a command": lambda mesh: remove_transactions(mesh.file, 1),
    "cut off by much": lambda mesh: remove_transactions(mesh.file, 8),
    "a byte of a value": lambda mesh: flip(mesh.file, mesh.file.read_bytes().rindex(b"digest") + 6),
    "a byte of a length": lambda mesh: flip(mesh.file, 1),
    "the manifest": lambda mesh: (mesh.file.parent / "appendonly.aof.manifest").write_bytes(b""),
    "the base": lambda mesh: (mesh.file.parent / "appendonly.aof.1.base.rdb").unlink(),
    "an older copy": copy_state,
    "all of it gone": lambda mesh: shutil.rmtree(mesh.place.redis_directory),
    "empty": lambda mesh: mesh.file.write_bytes(b""),
}


async def test_intact_state_continues_with_new_fencing_tokens(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1, 2)
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason == ""
        row = await jobs.read_job(bench.state, JOB)
        assert (row.version, row.lineage) == (2, 0)
        assert await bench.seat(TRAINER) >= seats.trainer + rollback.TOKEN_GAP
    assert not (mesh.place.root / corruption.QUARANTINE_DIRECTORY).exists()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("what", DAMAGE)
async def test_rolled_back_state_is_quarantined_at_the_next_start(mesh: Mesh, what: str) -> None:
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1)
        shutil.copytree(
            mesh.place.redis_directory,
            mesh.place.root / "copy",
            ignore=shutil.ignore_patterns("*.sock"),
        )
        await train(bench, seats, 2, 3)
        last = (await events.read_all(bench.state))[-1].id
    DAMAGE[what](mesh)
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason
        assert await jobs.read_jobs(bench.state) == []
        (told,) = await events.read_all(bench.state)
        assert told.kind == corruption.CORRUPTION_EVENT and told.fields["what"] == "redis"
        assert events.parse_event_id(told.id) > events.parse_event_id(last)
        assert mesh.redis.watermark.jobs[JOB].version == 3
        assert await bench.seat(TRAINER) > seats.trainer
        if what != "all of it gone":
            assert (
                mesh.place.root / corruption.QUARANTINE_DIRECTORY / "mesh/redis/appendonlydir"
            ).is_dir()
            assert told.fields["aside"] == str(
                mesh.place.root / corruption.QUARANTINE_DIRECTORY / "mesh/redis"
            )


async def test_state_of_another_version_is_rejected_and_stays_in_place(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        await bench.state.run_command("DEL", FORMAT_KEY)
    before = mesh.file.stat().st_size
    for _ in range(2):
        with pytest.raises(ConfigError, match="another version of MeshRL"):
            async with mesh.up():
                pass
    assert mesh.file.stat().st_size >= before
    assert not (mesh.place.root / corruption.QUARANTINE_DIRECTORY).exists()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("what", DAMAGE)
async def test_rolled_back_state_serves_no_request_during_a_run(mesh: Mesh, what: str) -> None:
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1)
        shutil.copytree(
            mesh.place.redis_directory,
            mesh.place.root / "copy",
            ignore=shutil.ignore_patterns("*.sock"),
        )
        await train(bench, seats, 2, 3)
        await mesh.await_noted_version(3)
        mesh.kill()
        DAMAGE[what](mesh)
        async with asyncio.timeout(scaled(WITHIN_S)):
            await mesh.back.wait()
        with pytest.raises(StateUnavailable):
            await StateClient.open(mesh.redis.url, connect_timeout_s=0.3)
        await mesh.redis.start_empty(mesh.why)
        await mesh.redis.reopen_to_mesh()
        assert await jobs.read_jobs(bench.state) == []
        await mesh.redis.finish_restore()
        successor = await Bench(bench.state, None).training_job()
        with pytest.raises(Fenced):  # stopped by the rollback, without any state
            await seats.commit(1, [])
        await train(bench, successor, 1, 2, 3, 4)
        await mesh.await_noted_version(4)
    async with mesh.up() as bench:
        assert (
            mesh.redis.rollback_reason == ""
            and (await jobs.read_job(bench.state, JOB)).version == 4
        )


async def test_job_that_is_not_restored_is_reported_once(mesh: Mesh) -> None:
    waits = mesh.place.root / "waits"
    waits.mkdir()
    write_json(waits / "job.json", {"job": "waits", "document": document()})
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1)
        await jobs.set_phase(bench.state, JOB, jobs.Phase.FAILED, seats.trainer, TRAINER)
        await jobs.submit(bench.state, "waits", document(), str(waits), "op")
    shutil.rmtree(mesh.place.redis_directory)
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason and mesh.redis.is_restoring
        await restore_all_jobs(bench.state, mesh.redis.watermark, required=True)
        await mesh.redis.finish_restore()
        mesh.kill()
        await mesh.await_server(bench)
        assert [row.id for row in await jobs.read_jobs(bench.state)] == ["waits"]
        assert mesh.why == ""
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason == "" and [
            row.id for row in await jobs.read_jobs(bench.state)
        ]
        # another job with the name of the lost one, which had made more progress
        await train(bench, await bench.training_job(), 1)
        await mesh.await_noted_version(1)
        mesh.kill()
        await mesh.await_server(bench)
        assert mesh.why == ""


async def test_jobs_being_restored_are_not_reported_and_an_interrupted_start_continues(
    mesh: Mesh,
) -> None:
    async with mesh.up() as bench:
        await train(bench, await bench.training_job(), 1)
    shutil.rmtree(mesh.place.redis_directory)
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason
        mesh.kill()
        await mesh.await_server(bench)
        assert mesh.why == "" and mesh.redis.is_restoring
    async with mesh.up():
        assert mesh.redis.rollback_reason == "" and mesh.redis.is_restoring
        await mesh.redis.finish_restore()
    async with mesh.up():
        assert mesh.redis.rollback_reason == "" and not mesh.redis.is_restoring


async def test_assigned_lineage_is_durable_before_its_use(mesh: Mesh) -> None:
    def read_watermark() -> rollback.JobWatermark:
        return notes.read_note(mesh.place.redis_note).watermark.jobs[JOB]

    async with mesh.up() as bench:
        await bench.training_job()
    shutil.rmtree(mesh.place.redis_directory)
    async with mesh.up() as bench:
        await steps.restart_job(bench.state, JOB, document(), str(mesh.place.root), 0)
        await mesh.redis.finish_restore()
        assert read_watermark().lineage == 1
    mesh.place.redis_note.unlink()
    async with mesh.up():
        assert read_watermark().lineage == 1, "what is there at the start is, too"


async def test_killed_server_continues(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1, 2)
        mesh.kill()
        async with asyncio.timeout(scaled(WITHIN_S)):
            while True:
                try:
                    assert (await jobs.read_job(bench.state, JOB)).version == 2
                    break
                except StateUnavailable:
                    continue
        await train(bench, seats, 3)
        assert not mesh.back.is_set()


async def test_server_killed_during_a_write_continues(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        await train(bench, await bench.training_job(), 1)
        await mesh.await_noted_file()
        mesh.kill()
        with mesh.file.open("ab") as file:
            file.write(b"*3\r\n$3\r\nSET\r\n$5\r\nplain\r\n$9000\r\nhalf")
        await mesh.await_server(bench)
        assert mesh.why == "" and (await jobs.read_job(bench.state, JOB)).version == 1
        await bench.state.run_command("SET", "plain", 1)
        await mesh.await_noted_file()


async def test_file_truncated_after_the_servers_exit_is_detected(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        await train(bench, await bench.training_job(), 1)
        before = mesh.file.stat().st_size
        await bench.state.run_command("SET", "plain", 1)  # recorded in the file alone
        await mesh.await_noted_file()
        mesh.kill()
        os.truncate(mesh.file, before)
        await mesh.await_server(bench)
        assert "bytes, fewer than the recorded" in mesh.why


async def test_failed_watch_task_ends_the_mesh_with_its_name(mesh: Mesh) -> None:
    async with mesh.up():
        mesh.clock.fails = True
        async with asyncio.timeout(scaled(WITHIN_S)):
            await mesh.owner.failed.wait()
        mesh.clock.fails = False
    assert mesh.owner.gave.startswith("redis: the task to ")
    assert mesh.owner.gave.endswith("failed: RuntimeError: no timer is left")


async def test_start_waits_for_disk_space(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    async with mesh.up() as bench:
        await train(bench, await bench.training_job(), 1)
    mesh.file.write_bytes(b"")
    quarantine, note = mesh.place.root / corruption.QUARANTINE_DIRECTORY, mesh.place.redis_note
    fresh = temporary_path(note)
    quarantine.write_bytes(b"")  # neither can be written
    fresh.mkdir()  # a directory blocks the path of the file

    async def room() -> str:
        said = ""
        for what, free in (("quarantining", quarantine.unlink), ("recording", fresh.rmdir)):
            while f"{what} the" not in said:
                await asyncio.sleep(0.02)
                said += capsys.readouterr().err
            free()
        return said

    making = asyncio.create_task(room())
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason and await jobs.read_jobs(bench.state) == []
    assert "Free disk space there" in await making


async def test_run_records_reveal_a_rollback_of_state_and_note(
    mesh: Mesh,
) -> None:
    root = mesh.place.root
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1)
    shutil.copytree(root / "mesh", root / "copy")
    async with mesh.up() as bench:
        again = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
        await train(bench, again, 2)
        told = await events.read_all(bench.state)
    (root / "job.json").write_text(json.dumps({"job": JOB}))
    lines = [{"id": e.id, "ms": e.ms, "kind": e.kind, "fields": e.fields} for e in told]
    (root / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(root / "mesh")
    (root / "copy").rename(root / "mesh")
    async with mesh.up() as bench:
        assert mesh.redis.rollback_reason and await jobs.read_jobs(bench.state) == []
        assert mesh.redis.watermark.jobs[JOB].version == 2
        assert await bench.seat(TRAINER) > again.trainer


async def test_corrupt_note_is_quarantined_and_the_state_continues(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        await train(bench, await bench.training_job(), 1)
    mesh.place.redis_note.write_text(mesh.place.redis_note.read_text().replace("event", "evens"))
    async with mesh.up() as bench:
        assert (
            mesh.redis.rollback_reason == ""
            and (await jobs.read_job(bench.state, JOB)).version == 1
        )
        told = (await events.read_all(bench.state))[-1]
        assert (told.kind, told.fields["what"]) == (corruption.CORRUPTION_EVENT, "redis note")
    assert (mesh.place.root / corruption.QUARANTINE_DIRECTORY / "mesh/redis-note.json").is_file()


async def test_external_servers_rollback_is_detected_without_deleting_data(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(embedded_server.find_server()) as server:
        monkeypatch.setenv("MESHRL_REDIS_URL", server.url)
        async with mesh.up() as bench:
            await train(bench, await bench.training_job(), 1, 2)
        async with mesh.up() as bench:
            assert (
                mesh.redis.rollback_reason == ""
                and (await jobs.read_job(bench.state, JOB)).version == 2
            )
            await mesh.await_noted_version(2)
            await bench.state.run_command("HSET", f"{{{JOB}}}:job", "version", 1)
            async with asyncio.timeout(scaled(WITHIN_S)):
                await mesh.back.wait()
        assert "not at version 2 of lineage 0" in mesh.why
        async with mesh.up() as bench:
            assert (
                mesh.redis.rollback_reason == mesh.why and await jobs.read_jobs(bench.state) == []
            )
            held = await bench.state.run_command("KEYS", "aside:*:job")
            assert await bench.state.run_command("HGET", held[0], "version") == "1"
        async with mesh.up():
            assert mesh.redis.is_restoring  # until the job is restored


async def test_expiring_and_leftover_keys_of_an_external_server_are_tolerated(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(embedded_server.find_server()) as server:
        monkeypatch.setenv("MESHRL_REDIS_URL", server.url)
        async with mesh.up() as bench:
            await train(bench, await bench.training_job(), 1)
        state = await StateClient.open(server.url)
        await state.run_command("HSET", f"{{{JOB}}}:job", "version", 0)
        fill = "for n = 1, 6000 do redis.call('SET', KEYS[1] .. n, n, 'PX', n % 1500 + 1) end"
        await state.run_command("EVAL", fill, 1, f"{{{JOB}}}:expires:")
        async with mesh.up():
            assert "not at version 1" in mesh.redis.rollback_reason
        # the keys that name their owner were removed first
        for key in await state.run_command("KEYS", "{mesh}*"):
            await state.run_command("DEL", key)
        await state.run_command("SET", f"{{{JOB}}}:left", 1)
        async with mesh.up():
            assert mesh.redis.rollback_reason == "it is empty"
        assert await state.run_command("KEYS", f"{{{JOB}}}:left") == []
        assert len(await state.run_command("KEYS", f"aside:*:{{{JOB}}}:left")) == 1
        await state.close()


async def test_full_disk_delays_the_note_only(mesh: Mesh) -> None:
    async with mesh.up() as bench:
        seats = await bench.training_job()
        await train(bench, seats, 1)
        note = mesh.place.redis_note
        temporary_path(note).mkdir()  # the note cannot be written
        mesh.kill()
        await asyncio.sleep(0)
        with pytest.raises(StateUnavailable):
            await StateClient.open(mesh.redis.url, connect_timeout_s=0.5)
        temporary_path(note).rmdir()
        await mesh.await_server(bench)
        assert (await jobs.read_job(bench.state, JOB)).version == 1
        assert not mesh.back.is_set()


async def test_port_and_password_survive_a_restart(mesh: Mesh) -> None:
    deep = mesh.place.root / ("deep" * 25)  # too long for a socket
    deep.mkdir()
    mesh.place = MeshPaths(deep)
    async with mesh.up() as bench:
        assert mesh.redis.url.startswith(f"redis://{embedded_server.MESH_USER}:")
        seats = await bench.training_job()
        await train(bench, seats, 1)
        mesh.kill()
        async with asyncio.timeout(scaled(WITHIN_S)):
            while True:
                try:
                    assert (await jobs.read_job(bench.state, JOB)).version == 1
                    break
                except StateUnavailable:
                    continue
        wrong_url = mesh.redis.url.replace(
            f"{embedded_server.MESH_USER}:", f"{embedded_server.MESH_USER}:x"
        )
        with pytest.raises(StateUnavailable):
            await StateClient.open(wrong_url, connect_timeout_s=0.3)
