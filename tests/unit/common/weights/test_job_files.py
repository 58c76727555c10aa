"""A job's files on a host that does not see where it is at home, and how a host finds that out."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.common.api.transfer.bulk_permissions import PUBLISHED
from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.digest import compute_file_digest
from meshrl.common.base.errors import CorruptData, NotFound
from meshrl.common.base.files.run_host import PROBE_PATH, RunHost, create_run_host
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.state import events, jobs
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.server_state import run_host
from meshrl.common.weights.bulk.port import ChunkStore, serve_chunks
from meshrl.common.weights.store.job_files import (
    _hold_bundle,
    bundle_directory,
    evict_bundles,
    find_local_modules,
    is_on_run_host,
    open_local_job,
    release_bundle,
)
from meshrl.services.weights.run_host_files import SharedTasks
from meshrl.services.weights.store import WeightStore
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets
from tests.unit.common.mesh.runtime.talking import cancel, until

JOB = "j"
SOON_S = 60.0  # for a thread to go on, on a busy host
PROBED = b"of this start"
PAUSE_S = 0.0002  # between removals: it leaves the processor to who holds
FILES = {"modules/mine.py": "X = 1\n", "modules/sub/more.py": "Y = 2\n", "data/train.jsonl": "{}\n"}


class House:
    """A head with a weight store and a job, and another host's processes."""

    def __init__(self, root: Path, state: StateClient) -> None:
        self.root, self.state = root, state
        self.head, self.second = root / "head", root / "second"
        self.run = self.head / "run"
        self.meshes: list[Mesh] = []

    @property
    def packed(self) -> Path:
        return self.run / "bundle/b"

    async def mesh(self, name: str, host: str, root: Path) -> Mesh:
        settings = MeshSettings(redis_url=self.state.url, run_root=str(root), host=host)
        made = on_sockets(name, self.state, SystemClock(), settings=settings)
        self.meshes.append(made)
        return made

    async def open(self) -> None:
        for name, content in FILES.items():
            path = self.packed / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        files = bundle_files.list_files(self.packed)
        self.digest = bundle_files.compute_digest(files)
        about = {"dir": str(self.packed), "digest": self.digest, "files": files}
        document = JobConfig(name=JOB).to_document() | {"bundle": about}
        await jobs.submit(self.state, JOB, document, str(self.run), "submit")
        await run_host.write_run_host(self.state, create_run_host("head", self.head, PROBED))
        (self.head / PROBE_PATH).write_bytes(b"what another host has at that place")
        serving = await self.mesh(STORE_NAME, "head", self.head)
        self.chunks = ChunkStore(self.head / "store")
        self.bulk = serve_chunks(serving, self.chunks)
        # Who asks for what takes a moment is told to ask again.
        store = WeightStore(serving, self.chunks, SharedTasks(serving, answer_s=0.0))
        await serving.join(store, bulk_address=self.bulk.address)

    async def process(self, name: str = "engine/g1") -> Mesh:
        made = await self.mesh(name, "second", self.second)
        await made.join(None)
        return made

    async def close(self) -> None:
        for mesh in reversed(self.meshes):
            await mesh.leave()
        self.bulk.close()
        for _ in range(len(self.meshes)):  # each may hold it
            release_bundle(self.fetched)

    @property
    def fetched(self) -> Path:
        return bundle_directory(self.second, self.digest)

    def content(self) -> dict[str, str]:
        """What was fetched."""
        found = (p for p in self.fetched.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {path.relative_to(self.fetched).as_posix(): path.read_text() for path in found}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    state = open_simulated_state(SystemClock())
    made = House(tmp_path, state)
    await made.open()
    yield made
    await made.close()
    await state.close()


async def test_a_bundle_is_fetched_by_its_digests_and_once_for_all_processes(house: House) -> None:
    meshes = [await house.process(f"engine/g{n}") for n in range(3)]
    row = await jobs.read_job(house.state, JOB)
    found = await asyncio.gather(*(open_local_job(mesh, row) for mesh in meshes))
    assert house.content() == FILES
    assert {data.bundle for data in found} == {house.fetched}
    assert {data.modules_dir for data in found} == {house.fetched / "modules"}  # checked as at home
    assert not list(house.fetched.glob(".fetching-*"))
    one = found[0]
    assert not one.is_on_run_host and one.run_dir == house.run and one.shared_bundle == house.packed
    assert (
        one.local_run_dir == house.second / "runs" / JOB / str(row.created_ms)
        and one.local_run_dir.is_dir()
    )
    # chunks of the store are further names of the same bytes, and go as chunks do
    digest = compute_file_digest(house.packed / "modules/mine.py")
    assert (
        house.chunks.open_space(PUBLISHED)
        .chunk_path(digest)
        .samefile(house.packed / "modules/mine.py")
    )
    shutil.rmtree(house.packed)
    assert (await open_local_job(meshes[0], row)).bundle == house.fetched  # nobody is asked again


async def test_a_bundle_stays_while_anybody_in_the_process_uses_it(house: House) -> None:
    mesh, row = await house.process(), await jobs.read_job(house.state, JOB)
    for _ in range(2):
        await open_local_job(mesh, row)
    release_bundle(house.fetched)
    evict_bundles(house.fetched.parent, 0)
    assert house.content() == FILES
    release_bundle(house.fetched)
    evict_bundles(house.fetched.parent, 0)
    assert not house.fetched.exists()


async def test_a_fetch_that_fails_holds_no_bundle(house: House) -> None:
    mesh = await house.process()
    (house.packed / "data/train.jsonl").unlink()
    with pytest.raises(NotFound):
        await open_local_job(mesh, await jobs.read_job(house.state, JOB))
    evict_bundles(house.fetched.parent, -1)
    assert not house.fetched.exists()


async def test_one_who_is_cancelled_while_a_bundle_is_held_holds_it_no_longer(
    house: House,
) -> None:
    mesh, used = await house.process(), house.fetched / ".used"
    used.parent.mkdir(parents=True)
    used.touch()
    os.utime(used, (0, 0))
    with used.open() as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        asking = asyncio.create_task(open_local_job(mesh, await jobs.read_job(house.state, JOB)))
        await until(lambda: f":{used.stat().st_ino} " in _waiting_for_locks())
        await cancel(asking)
    async with asyncio.timeout(scaled(SOON_S)):
        # the thread has it now, whom nobody waits for
        await until(lambda: used.stat().st_mtime != 0)
        while house.fetched.exists():
            evict_bundles(house.fetched.parent, -1)
            await asyncio.sleep(0.01)


def _waiting_for_locks() -> str:
    """Files whose locks somebody waits for, as the kernel tells it."""
    return "\n".join(line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)


def test_a_bundle_that_is_held_again_as_it_goes_is_not_taken_along(tmp_path: Path) -> None:
    """Those who hold wait for a removal on the mark that it takes along."""
    directory = tmp_path / "bundle"
    ended = threading.Event()

    def remove() -> None:
        while not ended.wait(PAUSE_S):
            evict_bundles(tmp_path, -1)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(500):
            _hold_bundle(directory)
            assert directory.is_dir()
            release_bundle(directory)
    finally:
        ended.set()
        thread.join()


async def test_one_that_is_damaged_at_home_is_not_there_in_part(house: House) -> None:
    mesh = await house.process()
    (house.packed / "modules/sub/more.py").write_text("Y = 3\n")
    with pytest.raises(CorruptData):
        await open_local_job(mesh, await jobs.read_job(house.state, JOB))
    assert not (house.fetched / "modules").exists()
    [told] = [e.fields for e in await events.read_all(house.state) if e.kind == "damaged"]
    assert (told["what"], told["job"]) == ("bundle", JOB)


async def test_one_that_is_gone_at_home_is_named(house: House) -> None:
    mesh = await house.process()
    (house.packed / "data/train.jsonl").unlink()
    with pytest.raises(NotFound, match=f"{house.packed}/data/train.jsonl is missing"):
        await open_local_job(mesh, await jobs.read_job(house.state, JOB))


async def test_a_sandbox_waits_for_code_that_its_agent_fetches(house: House) -> None:
    sandbox = await house.process("sandbox/j/0")
    modules = str(house.packed / "modules")
    with pytest.raises(ServiceUnavailable):
        await find_local_modules(sandbox, modules, house.digest)
    agent = await house.process("node/second")
    await open_local_job(agent, await jobs.read_job(house.state, JOB))
    here = await find_local_modules(sandbox, modules, house.digest)
    assert here == str(house.fetched / "modules")
    head = await house.mesh("sandbox/j/1", "head", house.head)
    assert await find_local_modules(head, modules, house.digest) == modules


async def test_a_directory_that_is_shared_is_used_when_the_probe_proves_it(house: House) -> None:
    mesh = await house.process()
    assert (told := await run_host.read_run_host(house.state)) is not None
    assert not await is_on_run_host(mesh, house.run)
    (house.head / PROBE_PATH).write_bytes(PROBED)
    assert await is_on_run_host(mesh, house.run)
    assert not await is_on_run_host(mesh, house.root / "elsewhere/run")
    assert (await open_local_job(mesh, await jobs.read_job(house.state, JOB))).is_on_run_host
    (house.head / PROBE_PATH).unlink()
    assert not await is_on_run_host(mesh, house.run)
    assert not RunHost("head", told.root, "").is_visible_on("second", house.run)


def test_bundles_that_nobody_uses_make_room_the_longest_unused_first(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "held", "middle", "new")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model/weights").write_bytes(b"x" * 1000)
        (tmp_path / name / ".used").touch()
        os.utime(tmp_path / name / ".used", (number, number))
    with (tmp_path / "held/.used").open() as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        evict_bundles(tmp_path, 2000)
        assert {path.name for path in tmp_path.iterdir()} == {"held", "new"}
        evict_bundles(tmp_path, 0)
        assert {path.name for path in tmp_path.iterdir()} == {"held"}
    evict_bundles(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
