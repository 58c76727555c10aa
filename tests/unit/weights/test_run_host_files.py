"""File operations of the store on a run host, which continue after their requester exits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from meshrl.common.api.ranks import FinishSaving
from meshrl.common.api.weights import (
    STORE_NAME,
    CheckpointAssembly,
    CheckpointQuarantine,
    LineBatch,
    UnfinishedCheckpoints,
)
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage, CorruptData, MeshError, NotFound
from meshrl.common.base.files import corruption
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.records.checkpoints import compute_file_digests
from meshrl.common.state import events, jobs
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.store.weight_store_client import (
    assemble_checkpoint,
    fetch_file,
    put_file,
)
from meshrl.services.trainer.gang.state_writers import check_rank_files
from meshrl.services.weights.run_host_files import (
    ANSWER_TIMEOUT_S,
    STALL_TIMEOUT_S,
    SharedTasks,
    TaskProgress,
)
from meshrl.services.weights.store import WeightStore
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.trainer.ranks.test_rank_saving import GENERATION, order, saving, scratch
from tests.unit.weights.store_bench import JOB, StoreBench, on_store
from tests.unit.weights.store_processes import Store

T = TypeVar("T")
SOON_S = 15.0  # two sweeps and a margin
FIRST, SECOND, COMMITTED = (f"step-000-00000{n}-{n}aaaaaaa" for n in (1, 2, 3))


async def list_corruption_events(store: StoreBench) -> list[dict[str, Any]]:
    return [
        e.fields
        for e in await events.read_all(store.state)
        if e.kind == corruption.CORRUPTION_EVENT
    ]


def make_unfinished_checkpoints(store: StoreBench, *names: str) -> None:
    for name in names:
        (store.run_dir / "checkpoints" / name).mkdir(parents=True)
        (store.run_dir / "checkpoints" / name / "model").touch()


@story_on(on_store, "tmp_path")
async def test_quarantines_of_a_cancelled_call_are_reported_once(
    store: StoreBench, tmp_path: Path
) -> None:
    await store.submit()
    make_unfinished_checkpoints(store, FIRST, SECOND)
    store.redis.faults.delay_s = 1.0
    removal = asyncio.create_task(
        store.store.remove_unfinished_checkpoints(UnfinishedCheckpoints(JOB, COMMITTED))
    )
    while not (tmp_path / "quarantine").exists():
        await store.clock.sleep(0.1)
    await store.clock.sleep(0.5)  # Redis has the first event, and its answer is on the way
    removal.cancel()
    await asyncio.gather(removal, return_exceptions=True)
    store.redis.faults.delay_s = 0.0
    await store.clock.sleep(SOON_S)
    stems = [Path(fields["path"]).stem for fields in await list_corruption_events(store)]
    assert stems == [FIRST, SECOND]


@story_on(on_store, "tmp_path")
async def test_quarantine_is_reported_without_its_requester(store: StoreBench) -> None:
    await store.submit()
    make_unfinished_checkpoints(store, FIRST)
    fields = corruption.make_event_fields(
        "checkpoint", Path(f"/{FIRST}.json"), "bad", "other", job=JOB
    )
    quarantined_path = await store.store.quarantine_checkpoint(
        CheckpointQuarantine(JOB, FIRST, "op", fields)
    )
    assert (
        await store.store.quarantine_checkpoint(CheckpointQuarantine(JOB, FIRST, "op", fields))
        == ""
    )
    # the event was recorded after all
    await events.append(store.state, corruption.CORRUPTION_EVENT, fields, "op")
    [event_fields] = await list_corruption_events(store)
    assert event_fields == fields | {"aside": quarantined_path} and quarantined_path


class GatedHost(SystemHost):
    """Host that opens no file for appending before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_waiting = threading.Event(), threading.Event()

    def open_append(self, path: Path) -> AppendFile:
        self.is_waiting.set()
        assert self.gate.wait(scaled(60.0))
        return super().open_append(path)


async def test_samples_sent_again_during_the_write_are_stored_once(tmp_path: Path) -> None:
    state, host = open_simulated_state(SystemClock()), GatedHost()
    await jobs.submit(state, JOB, JobConfig(name=JOB).to_document(), str(tmp_path), "submit")
    mesh = on_sockets(STORE_NAME, state, SystemClock(), host=host)
    store = WeightStore(mesh, ChunkStore(tmp_path / "store"))
    batch = LineBatch(JOB, "samples", "op", "a line\n")
    first = asyncio.create_task(store.append_lines(batch))
    while not host.is_waiting.is_set():
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(store.append_lines(batch))
    await asyncio.sleep(0)
    host.gate.set()
    await second
    await store.append_lines(batch)
    assert (tmp_path / "samples.jsonl").read_text() == "a line\n"
    await store.stop()
    await mesh.leave()
    await state.close()


@pytest.mark.parametrize("name", ["job", "../samples", "trace/../job", "trace/", "events"])
@story_on(on_store, "tmp_path")
async def test_only_sample_and_trace_files_may_be_appended(store: StoreBench, name: str) -> None:
    await store.submit()
    before = sorted(store.run_dir.rglob("*"))
    with pytest.raises(BadMessage, match="not a file of samples or traces"):
        await store.store.append_lines(LineBatch(JOB, name, "op", "a line\n"))
    assert sorted(store.run_dir.rglob("*")) == before
    for allowed in ("samples-3", "trace/shard-0", "trace/engine-g3.0", "trace/trainer"):
        await store.store.append_lines(LineBatch(JOB, allowed, "op", "a line\n"))
        assert (store.run_dir / f"{allowed}.jsonl").read_text() == "a line\n"


class SlowDisk(SimulatedHost):
    """Disk that moves one byte after each of `pauses`, in seconds, before it does the work."""

    pauses: tuple[float, ...] = ()

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        for pause_s in self.pauses if args and isinstance(args[0], TaskProgress) else ():
            await asyncio.sleep(pause_s)
            args[0](1)
        return fn(*args)


@story_on(on_store, "tmp_path")
async def test_copy_continues_as_long_as_bytes_move(store: StoreBench) -> None:
    disk = SlowDisk(store.clock, store.random.child("disk"))
    mesh, moved_counts = store.mesh("copying", "weights"), list[int]()
    mesh.host = disk
    shared_tasks = SharedTasks(mesh)
    disk.pauses = (0.9 * STALL_TIMEOUT_S,) * 4
    wait_count = 0

    def count_bytes(progress: TaskProgress) -> int:
        moved_counts.append(progress.moved_bytes)
        return 1

    while await shared_tasks.join("it", count_bytes, "it") is None:
        wait_count += 1
    assert moved_counts == [4]
    # requests are answered all along
    assert wait_count >= 3 * STALL_TIMEOUT_S / ANSWER_TIMEOUT_S - 1
    disk.pauses = (1.0, 2 * STALL_TIMEOUT_S)
    with pytest.raises(MeshError, match="it has made no progress for 600 s, after 1 bytes"):
        while await shared_tasks.join("it", lambda _: 1, "it") is None:
            pass
    await shared_tasks.stop()


def test_abandoned_copy_stops_at_the_next_block(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    abandoned = TaskProgress()
    abandoned.is_abandoned = True
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    chunks = ChunkStore(shm / f"meshrl-test-{os.getpid()}")
    try:
        with pytest.raises(MeshError, match="was cancelled"):
            chunks.import_file(source, "0" * 64, abandoned)
        assert not chunks.has("0" * 64) and not list(chunks.directory.glob("*/.*"))
        chunks.import_file(source, "0" * 64, progress := TaskProgress())
        assert (
            chunks.chunk_path("0" * 64).read_bytes() == b"x" * 100 and progress.moved_bytes == 100
        )
    finally:
        for path in sorted(chunks.directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        chunks.directory.rmdir()


async def test_checkpoint_assembly_is_polled_until_done(store: Store, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "state").write_bytes(os.urandom(3 << 20))
    files = {"state": store.chunks.write_file(source / "state")}
    await jobs.submit(store.mesh.state, JOB, JobConfig(name=JOB).to_document(), str(tmp_path), "it")
    await assemble_checkpoint(store.mesh, CheckpointAssembly(JOB, FIRST, files))
    assert compute_file_digests(tmp_path / "checkpoints" / FIRST) == files


async def test_file_is_transferred_by_its_digest(store: Store, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(content := os.urandom(100_000))
    target = tmp_path / "new" / "target"
    digest = await put_file(store.mesh, store.bulk, source, "a file")
    await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert target.read_bytes() == content
    with pytest.raises(NotFound):
        await fetch_file(store.mesh, store.bulk, "0" * 64, target, "a file")
    assert target.read_bytes() == content


async def test_corrupt_file_is_quarantined_and_stored_again(store: Store, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(content := os.urandom(100_000))
    target = tmp_path / "new" / "target"
    digest = await put_file(store.mesh, store.bulk, source, "a file")
    store.chunks.chunk_path(digest).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptData):
        await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert not store.chunks.has(digest) and not target.exists()
    await put_file(store.mesh, store.bulk, source, "a file")
    await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert target.read_bytes() == content


NAME = "step-000-000001-aa.core"
FINISH_SAVING = FinishSaving(GENERATION, "elsewhere", NAME)


async def test_finished_files_are_reported_again_after_a_lost_answer(
    store: Store, tmp_path: Path
) -> None:
    rank = saving(tmp_path, store.mesh)
    await rank.save(order(NAME))
    part_path = tmp_path / f"checkpoints/{NAME}.1/state/part-00001-00000.safetensors"
    content = part_path.read_bytes()
    answers = [await rank.finish(FINISH_SAVING) for _ in range(2)]
    files = answers[0].files
    check_rank_files(1, files)
    assert list(files) == [part_path.name] and answers[1] == answers[0]
    assert not answers[0].fault.code and not scratch(tmp_path)
    target = tmp_path / "there"
    await fetch_file(store.mesh, store.bulk, files[part_path.name], target, "a part")
    assert target.read_bytes() == content


async def test_errors_of_finish_are_returned_in_the_answer(store: Store, tmp_path: Path) -> None:
    rank = saving(tmp_path, store.mesh)
    await rank.save(order(NAME))
    directory = tmp_path / f"checkpoints/{NAME}.1/state"
    (directory / "part-00001-00001.safetensors").symlink_to("/proc/self/mem")  # reading fails
    answer = await rank.finish(FINISH_SAVING)
    assert answer.fault.code and not answer.files and not scratch(tmp_path)
