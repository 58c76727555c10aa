"""A job's files on a host that may or may not share the run host's directory."""

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
SOON_S = 60.0  # for a thread to continue on a busy host
PROBED = b"of this start"
PAUSE_S = 0.0002  # between removals: leaves the processor to the users of the bundle
FILES = {"modules/mine.py": "X = 1\n", "modules/sub/more.py": "Y = 2\n", "data/train.jsonl": "{}\n"}


class JobHosts:
    """Head with a weight store and a job, and processes of another host."""

    def __init__(self, root: Path, state: StateClient) -> None:
        self.root, self.state = root, state
        self.head, self.second = root / "head", root / "second"
        self.run = self.head / "run"
        self.meshes: list[Mesh] = []

    @property
    def source_bundle(self) -> Path:
        return self.run / "bundle/b"

    async def mesh(self, name: str, host: str, root: Path) -> Mesh:
        settings = MeshSettings(redis_url=self.state.url, run_root=str(root), host=host)
        mesh = on_sockets(name, self.state, SystemClock(), settings=settings)
        self.meshes.append(mesh)
        return mesh

    async def open(self) -> None:
        for name, content in FILES.items():
            path = self.source_bundle / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        files = bundle_files.list_files(self.source_bundle)
        self.digest = bundle_files.compute_digest(files)
        bundle = {"dir": str(self.source_bundle), "digest": self.digest, "files": files}
        document = JobConfig(name=JOB).to_document() | {"bundle": bundle}
        await jobs.submit(self.state, JOB, document, str(self.run), "submit")
        await run_host.write_run_host(self.state, create_run_host("head", self.head, PROBED))
        (self.head / PROBE_PATH).write_bytes(b"what another host has at that place")
        store_mesh = await self.mesh(STORE_NAME, "head", self.head)
        self.chunks = ChunkStore(self.head / "store")
        self.bulk = serve_chunks(store_mesh, self.chunks)
        # A slow request gets the answer to retry.
        store = WeightStore(store_mesh, self.chunks, SharedTasks(store_mesh, answer_s=0.0))
        await store_mesh.join(store, bulk_address=self.bulk.address)

    async def process(self, name: str = "engine/g1") -> Mesh:
        mesh = await self.mesh(name, "second", self.second)
        await mesh.join(None)
        return mesh

    async def close(self) -> None:
        for mesh in reversed(self.meshes):
            await mesh.leave()
        self.bulk.close()
        for _ in range(len(self.meshes)):  # each may use the bundle
            release_bundle(self.fetched_bundle)

    @property
    def fetched_bundle(self) -> Path:
        return bundle_directory(self.second, self.digest)

    def read_fetched(self) -> dict[str, str]:
        """Return the fetched files by name."""
        paths = (
            p for p in self.fetched_bundle.rglob("*") if p.is_file() and not p.name.startswith(".")
        )
        return {
            path.relative_to(self.fetched_bundle).as_posix(): path.read_text() for path in paths
        }


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[JobHosts]:
    state = open_simulated_state(SystemClock())
    bench = JobHosts(tmp_path, state)
    await bench.open()
    yield bench
    await bench.close()
    await state.close()


async def test_bundle_is_fetched_once_for_all_processes(hosts: JobHosts) -> None:
    meshes = [await hosts.process(f"engine/g{n}") for n in range(3)]
    row = await jobs.read_job(hosts.state, JOB)
    job_data = await asyncio.gather(*(open_local_job(mesh, row) for mesh in meshes))
    assert hosts.read_fetched() == FILES
    assert {data.bundle for data in job_data} == {hosts.fetched_bundle}
    # the same path as on the run host
    assert {data.modules_dir for data in job_data} == {hosts.fetched_bundle / "modules"}
    assert not list(hosts.fetched_bundle.glob(".fetching-*"))
    first = job_data[0]
    assert (
        not first.is_on_run_host
        and first.run_dir == hosts.run
        and first.shared_bundle == hosts.source_bundle
    )
    assert (
        first.local_run_dir == hosts.second / "runs" / JOB / str(row.created_ms)
        and first.local_run_dir.is_dir()
    )
    # chunks of the store are hard links to the same files, and are deleted as chunks
    digest = compute_file_digest(hosts.source_bundle / "modules/mine.py")
    assert (
        hosts.chunks.open_space(PUBLISHED)
        .chunk_path(digest)
        .samefile(hosts.source_bundle / "modules/mine.py")
    )
    shutil.rmtree(hosts.source_bundle)
    assert (
        await open_local_job(meshes[0], row)
    ).bundle == hosts.fetched_bundle  # no process is contacted again


async def test_bundle_is_retained_while_any_user_holds_it(hosts: JobHosts) -> None:
    mesh, row = await hosts.process(), await jobs.read_job(hosts.state, JOB)
    for _ in range(2):
        await open_local_job(mesh, row)
    release_bundle(hosts.fetched_bundle)
    evict_bundles(hosts.fetched_bundle.parent, 0)
    assert hosts.read_fetched() == FILES
    release_bundle(hosts.fetched_bundle)
    evict_bundles(hosts.fetched_bundle.parent, 0)
    assert not hosts.fetched_bundle.exists()


async def test_failed_fetch_does_not_hold_the_bundle(hosts: JobHosts) -> None:
    mesh = await hosts.process()
    (hosts.source_bundle / "data/train.jsonl").unlink()
    with pytest.raises(NotFound):
        await open_local_job(mesh, await jobs.read_job(hosts.state, JOB))
    evict_bundles(hosts.fetched_bundle.parent, -1)
    assert not hosts.fetched_bundle.exists()


async def test_cancelled_wait_for_a_bundle_does_not_hold_it(
    hosts: JobHosts,
) -> None:
    mesh, marker = await hosts.process(), hosts.fetched_bundle / ".used"
    marker.parent.mkdir(parents=True)
    marker.touch()
    os.utime(marker, (0, 0))
    with marker.open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        opening = asyncio.create_task(open_local_job(mesh, await jobs.read_job(hosts.state, JOB)))
        await until(lambda: f":{marker.stat().st_ino} " in _waiting_for_locks())
        await cancel(opening)
    async with asyncio.timeout(scaled(SOON_S)):
        # the thread has the lock now, and its caller has gone
        await until(lambda: marker.stat().st_mtime != 0)
        while hosts.fetched_bundle.exists():
            evict_bundles(hosts.fetched_bundle.parent, -1)
            await asyncio.sleep(0.01)


def _waiting_for_locks() -> str:
    """Return the locks with waiters, as the kernel reports them."""
    return "\n".join(line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)


def test_bundle_reacquired_during_its_removal_exists(tmp_path: Path) -> None:
    """Check that a user waits for a removal, since it locks a file that the removal deletes."""
    directory = tmp_path / "bundle"
    stop = threading.Event()

    def remove() -> None:
        while not stop.wait(PAUSE_S):
            evict_bundles(tmp_path, -1)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(500):
            _hold_bundle(directory)
            assert directory.is_dir()
            release_bundle(directory)
    finally:
        stop.set()
        thread.join()


async def test_corrupt_source_bundle_leaves_no_partial_copy(hosts: JobHosts) -> None:
    mesh = await hosts.process()
    (hosts.source_bundle / "modules/sub/more.py").write_text("Y = 3\n")
    with pytest.raises(CorruptData):
        await open_local_job(mesh, await jobs.read_job(hosts.state, JOB))
    assert not (hosts.fetched_bundle / "modules").exists()
    [event] = [e.fields for e in await events.read_all(hosts.state) if e.kind == "damaged"]
    assert (event["what"], event["job"]) == ("bundle", JOB)


async def test_missing_source_file_is_named(hosts: JobHosts) -> None:
    mesh = await hosts.process()
    (hosts.source_bundle / "data/train.jsonl").unlink()
    with pytest.raises(NotFound, match=f"{hosts.source_bundle}/data/train.jsonl is missing"):
        await open_local_job(mesh, await jobs.read_job(hosts.state, JOB))


async def test_sandbox_waits_for_code_that_its_agent_fetches(hosts: JobHosts) -> None:
    sandbox = await hosts.process("sandbox/j/0")
    modules = str(hosts.source_bundle / "modules")
    with pytest.raises(ServiceUnavailable):
        await find_local_modules(sandbox, modules, hosts.digest)
    agent = await hosts.process("node/second")
    await open_local_job(agent, await jobs.read_job(hosts.state, JOB))
    local_modules = await find_local_modules(sandbox, modules, hosts.digest)
    assert local_modules == str(hosts.fetched_bundle / "modules")
    head = await hosts.mesh("sandbox/j/1", "head", hosts.head)
    assert await find_local_modules(head, modules, hosts.digest) == modules


async def test_shared_directory_is_used_if_the_probe_matches(hosts: JobHosts) -> None:
    mesh = await hosts.process()
    assert (recorded := await run_host.read_run_host(hosts.state)) is not None
    assert not await is_on_run_host(mesh, hosts.run)
    (hosts.head / PROBE_PATH).write_bytes(PROBED)
    assert await is_on_run_host(mesh, hosts.run)
    assert not await is_on_run_host(mesh, hosts.root / "elsewhere/run")
    assert (await open_local_job(mesh, await jobs.read_job(hosts.state, JOB))).is_on_run_host
    (hosts.head / PROBE_PATH).unlink()
    assert not await is_on_run_host(mesh, hosts.run)
    assert not RunHost("head", recorded.root, "").is_visible_on("second", hosts.run)


def test_unused_bundles_are_evicted_least_recently_used_first(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "held", "middle", "new")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model/weights").write_bytes(b"x" * 1000)
        (tmp_path / name / ".used").touch()
        os.utime(tmp_path / name / ".used", (number, number))
    with (tmp_path / "held/.used").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_SH)
        evict_bundles(tmp_path, 2000)
        assert {path.name for path in tmp_path.iterdir()} == {"held", "new"}
        evict_bundles(tmp_path, 0)
        assert {path.name for path in tmp_path.iterdir()} == {"held"}
    evict_bundles(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
