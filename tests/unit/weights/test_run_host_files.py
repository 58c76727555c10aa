"""File operations of the store on a run host, which outlive the process that requested them."""

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
SOON_S = 15.0  # two sweeps and something
FIRST, SECOND, COMMITTED = (f"step-000-00000{n}-{n}aaaaaaa" for n in (1, 2, 3))


async def told_of(store: StoreBench) -> list[dict[str, Any]]:
    return [
        e.fields
        for e in await events.read_all(store.state)
        if e.kind == corruption.CORRUPTION_EVENT
    ]


def left(store: StoreBench, *names: str) -> None:
    for name in names:
        (store.run_dir / "checkpoints" / name).mkdir(parents=True)
        (store.run_dir / "checkpoints" / name / "model").touch()


@story_on(on_store, "tmp_path")
async def test_all_that_a_cancelled_call_has_set_aside_is_told_once(
    store: StoreBench, tmp_path: Path
) -> None:
    await store.submit()
    left(store, FIRST, SECOND)
    store.redis.faults.delay_s = 1.0
    clearing = asyncio.create_task(
        store.store.remove_unfinished_checkpoints(UnfinishedCheckpoints(JOB, COMMITTED))
    )
    while not (tmp_path / "quarantine").exists():
        await store.clock.sleep(0.1)
    await store.clock.sleep(0.5)  # Redis has the first event, and its answer is on the way
    clearing.cancel()
    await asyncio.gather(clearing, return_exceptions=True)
    store.redis.faults.delay_s = 0.0
    await store.clock.sleep(SOON_S)
    told = [Path(fields["path"]).stem for fields in await told_of(store)]
    assert told == [FIRST, SECOND]


@story_on(on_store, "tmp_path")
async def test_who_sets_a_checkpoint_aside_need_not_stay_to_tell_of_it(store: StoreBench) -> None:
    await store.submit()
    left(store, FIRST)
    fields = corruption.make_event_fields(
        "checkpoint", Path(f"/{FIRST}.json"), "bad", "other", job=JOB
    )
    moved = await store.store.quarantine_checkpoint(CheckpointQuarantine(JOB, FIRST, "op", fields))
    assert (
        await store.store.quarantine_checkpoint(CheckpointQuarantine(JOB, FIRST, "op", fields))
        == ""
    )
    await events.append(
        store.state, corruption.CORRUPTION_EVENT, fields, "op"
    )  # it is there after all
    [told] = await told_of(store)
    assert told == fields | {"aside": moved} and moved


class Gated(SystemHost):
    """Opens no file to append to before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = threading.Event(), threading.Event()

    def open_append(self, path: Path) -> AppendFile:
        self.waiting.set()
        assert self.gate.wait(scaled(60.0))
        return super().open_append(path)


async def test_samples_sent_again_while_they_are_written_are_there_once(tmp_path: Path) -> None:
    state, host = open_simulated_state(SystemClock()), Gated()
    await jobs.submit(state, JOB, JobConfig(name=JOB).to_document(), str(tmp_path), "submit")
    mesh = on_sockets(STORE_NAME, state, SystemClock(), host=host)
    store = WeightStore(mesh, ChunkStore(tmp_path / "store"))
    asked = LineBatch(JOB, "samples", "op", "a line\n")
    first = asyncio.create_task(store.append_lines(asked))
    while not host.waiting.is_set():
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(store.append_lines(asked))
    await asyncio.sleep(0)
    host.gate.set()
    await second
    await store.append_lines(asked)
    assert (tmp_path / "samples.jsonl").read_text() == "a line\n"
    await store.stop()
    await mesh.leave()
    await state.close()


@pytest.mark.parametrize("name", ["job", "../samples", "trace/../job", "trace/", "events"])
@story_on(on_store, "tmp_path")
async def test_only_files_of_samples_and_traces_are_named(store: StoreBench, name: str) -> None:
    await store.submit()
    before = sorted(store.run_dir.rglob("*"))
    with pytest.raises(BadMessage, match="no file of samples or traces"):
        await store.store.append_lines(LineBatch(JOB, name, "op", "a line\n"))
    assert sorted(store.run_dir.rglob("*")) == before
    for good in ("samples-3", "trace/shard-0", "trace/engine-g3.0", "trace/trainer"):
        await store.store.append_lines(LineBatch(JOB, good, "op", "a line\n"))
        assert (store.run_dir / f"{good}.jsonl").read_text() == "a line\n"


class SlowDisk(SimulatedHost):
    """Moves a byte after each of `pauses`, in seconds, before a piece of work is done."""

    pauses: tuple[float, ...] = ()

    async def run_blocking(self, fn: Callable[..., T], *args: Any, deadline_s: float) -> T:
        for pause_s in self.pauses if args and isinstance(args[0], TaskProgress) else ():
            await asyncio.sleep(pause_s)
            args[0](1)
        return fn(*args)


@story_on(on_store, "tmp_path")
async def test_a_copy_may_take_as_long_as_its_bytes_move(store: StoreBench) -> None:
    disk = SlowDisk(store.clock, store.random.child("disk"))
    mesh, done = store.mesh("copying", "weights"), list[int]()
    mesh.host = disk
    errands = SharedTasks(mesh)
    disk.pauses = (0.9 * STALL_TIMEOUT_S,) * 4
    asked = 0

    def count_bytes(moved: TaskProgress) -> int:
        done.append(moved.moved_bytes)
        return 1

    while await errands.join("it", count_bytes, "it") is None:
        asked += 1
    assert done == [4]
    assert (
        asked >= 3 * STALL_TIMEOUT_S / ANSWER_TIMEOUT_S - 1
    )  # and requests are answered all along
    disk.pauses = (1.0, 2 * STALL_TIMEOUT_S)
    with pytest.raises(MeshError, match="no byte of it has moved for 600 s, after 1"):
        while await errands.join("it", lambda _: 1, "it") is None:
            pass
    await errands.stop()


def test_a_thread_that_nobody_waits_for_ends_at_its_next_block(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    given_up = TaskProgress()
    given_up.is_abandoned = True
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    chunks = ChunkStore(shared / f"meshrl-test-{os.getpid()}")
    try:
        with pytest.raises(MeshError, match="given up"):
            chunks.import_file(source, "0" * 64, given_up)
        assert not chunks.has("0" * 64) and not list(chunks.directory.glob("*/.*"))
        chunks.import_file(source, "0" * 64, progress := TaskProgress())
        assert (
            chunks.chunk_path("0" * 64).read_bytes() == b"x" * 100 and progress.moved_bytes == 100
        )
    finally:
        for path in sorted(chunks.directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        chunks.directory.rmdir()


async def test_who_waits_for_a_checkpoint_asks_until_it_is_laid_out(
    store: Store, tmp_path: Path
) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "state").write_bytes(os.urandom(3 << 20))
    files = {"state": store.chunks.write_file(source / "state")}
    await jobs.submit(store.mesh.state, JOB, JobConfig(name=JOB).to_document(), str(tmp_path), "it")
    await assemble_checkpoint(store.mesh, CheckpointAssembly(JOB, FIRST, files))
    assert compute_file_digests(tmp_path / "checkpoints" / FIRST) == files


async def test_a_file_crosses_hosts_by_its_digest(store: Store, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(content := os.urandom(100_000))
    target = tmp_path / "new" / "target"
    digest = await put_file(store.mesh, store.bulk, source, "a file")
    await fetch_file(store.mesh, store.bulk, digest, target, "a file")
    assert target.read_bytes() == content
    with pytest.raises(NotFound):
        await fetch_file(store.mesh, store.bulk, "0" * 64, target, "a file")
    assert target.read_bytes() == content


async def test_a_damaged_one_is_set_aside_and_put_again(store: Store, tmp_path: Path) -> None:
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
SAVED = FinishSaving(GENERATION, "elsewhere", NAME)


async def test_they_are_there_and_told_once_more_when_an_answer_was_lost(
    store: Store, tmp_path: Path
) -> None:
    rank = saving(tmp_path, store.mesh)
    await rank.save(order(NAME))
    written = tmp_path / f"checkpoints/{NAME}.1/state/part-00001-00000.safetensors"
    content = written.read_bytes()
    answers = [await rank.finish(SAVED) for _ in range(2)]
    files = answers[0].files
    check_rank_files(1, files)
    assert list(files) == [written.name] and answers[1] == answers[0]
    assert not answers[0].fault.code and not scratch(tmp_path)
    into = tmp_path / "there"
    await fetch_file(store.mesh, store.bulk, files[written.name], into, "a part")
    assert into.read_bytes() == content


async def test_what_hinders_them_is_an_answer(store: Store, tmp_path: Path) -> None:
    rank = saving(tmp_path, store.mesh)
    await rank.save(order(NAME))
    directory = tmp_path / f"checkpoints/{NAME}.1/state"
    (directory / "part-00001-00001.safetensors").symlink_to("/proc/self/mem")  # reading fails
    answer = await rank.finish(SAVED)
    assert answer.fault.code and not answer.files and not scratch(tmp_path)
