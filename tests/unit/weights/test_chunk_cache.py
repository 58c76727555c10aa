"""Chunk cache of a host: each chunk crosses the network once for all processes of the host."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from loadtests.weights.contents import staged_whole
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import NotFound
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.chunk_cache import MAX_UNUSED_S, fetch_through_cache, remove_unused
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import on_sockets
from tests.unit.weights.store_processes import ProcessesOnHosts

CHUNK = 100_000
TENSORS = {f"layers.{i}": torch.full((CHUNK // 4,), float(i)) for i in range(4)}
SIZE = len(TENSORS) * CHUNK  # of the version, in as many chunks


class Hosts(ProcessesOnHosts):
    """Head with a weight store behind a proxy, and a host with many processes."""

    digest: str

    @property
    def cache(self) -> ChunkStore:
        return ChunkStore(self.root / "second/chunks")

    def list_files(self) -> list[str]:
        return sorted(path.name for path in self.cache.directory.glob("??/*"))


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    bench = Hosts(tmp_path, open_simulated_state(SystemClock()))
    # It publishes the address of the transport: proofs are valid for no other address.
    async with bench.run_store("127.0.0.2"):
        trainer = bench.trainer
        bulk_client = BulkClient(trainer)
        bench.digest = await staged_whole(trainer, bulk_client, "j", 0, 0, TENSORS, most=CHUNK)
        assert is_complete(await WeightReceiver(trainer, bulk_client).receive(bench.digest))
        assert bench.proxy.carried_bytes == 0 and not (tmp_path / "head/chunks").exists()
        yield bench


def is_complete(image: VersionImage) -> bool:
    return all(torch.equal(image.tensors[name], tensor) for name, tensor in TENSORS.items())


def sum_counters(*meshes: Mesh) -> dict[str, float]:
    names = ("found", "found_bytes", "fetched", "fetched_bytes", "damaged", "not_kept")
    counters = [mesh.telemetry.counters for mesh in meshes]
    return {name: sum(c.get(f"chunks_{name}", 0) for c in counters) for name in names}


async def test_processes_of_a_host_fetch_a_version_once(hosts: Hosts) -> None:
    receivers = [await hosts.receiver(f"engine/g{n}", "second") for n in range(3)]
    images = await asyncio.gather(*(one.receive(hosts.digest) for _, one in receivers))
    assert all(map(is_complete, images))
    assert SIZE < hosts.proxy.carried_bytes < SIZE * 1.2
    counters = sum_counters(*(mesh for mesh, _ in receivers))
    assert counters["fetched_bytes"] == SIZE and counters["found_bytes"] == 2 * SIZE
    assert counters["fetched"] == 4 and counters["found"] == 8
    assert len(hosts.list_files()) == 4
    for name in hosts.list_files():
        hosts.store.chunk_path(name).unlink()
    _, later = await hosts.receiver("engine/g3", "second")
    assert is_complete(await later.receive(hosts.digest))  # no source is contacted again


@pytest.mark.parametrize("harm", ["flipped", "cut", "emptied"])
async def test_corrupt_chunk_is_fetched_again_and_never_loaded(hosts: Hosts, harm: str) -> None:
    _, first = await hosts.receiver("engine/g0", "second")
    await first.receive(hosts.digest)
    path = hosts.cache.chunk_path(hosts.list_files()[0])
    content = path.read_bytes()
    corruptions = {
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "cut": content[: CHUNK // 2],
        "emptied": b"",
    }
    path.write_bytes(corruptions[harm])
    before = hosts.proxy.carried_bytes
    mesh, second = await hosts.receiver("engine/g1", "second")
    assert is_complete(await second.receive(hosts.digest))
    assert CHUNK < hosts.proxy.carried_bytes - before < CHUNK * 1.5
    counters = sum_counters(mesh)
    assert counters["fetched"] == 1 and counters["damaged"] == 1 and counters["found"] == 3
    assert path.read_bytes() == content


@pytest.mark.rotating(2)
@pytest.mark.parametrize("why", ["full", "no directory", "too little", "none"])
async def test_chunks_that_cannot_be_cached_are_still_received(hosts: Hosts, why: str) -> None:
    (hosts.root / "second").mkdir()
    more = {"too little": {"chunks_bytes": CHUNK // 2}, "none": {"chunks_bytes": 0}}.get(why, {})
    mesh, receiver = await hosts.receiver("engine/g0", "second", **more)
    if why == "no directory":
        (hosts.root / "second/chunks").write_text("")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if why == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK // 2, hard))
    try:
        for _ in range(2):
            assert is_complete(await receiver.receive(hosts.digest))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # bytes that arrive before the disk reports an error
    wasted_bytes = 2 * SIZE if why == "full" else 0
    assert 2 * SIZE < hosts.proxy.carried_bytes < 2 * SIZE * 1.2 + wasted_bytes
    assert hosts.list_files() == []
    assert sum_counters(mesh)["not_kept"] == (0 if why == "none" else 8)


async def test_least_recently_used_chunk_is_evicted(hosts: Hosts) -> None:
    mesh = hosts.process("engine/g0", "second", chunks_bytes=3 * CHUNK)
    contents = [bytes([n]) * CHUNK for n in range(4)]
    digests = [compute_digest(content) for content in contents]

    async def get(n: int) -> None:
        async def fetch() -> bytes:
            return contents[n]

        assert await fetch_through_cache(mesh, digests[n], fetch) == contents[n]
        used_s = 1_000_000_000 + next(times)
        os.utime(hosts.cache.chunk_path(digests[n]), (used_s, used_s))

    times = iter(range(10))
    for n in (0, 1, 2, 0, 3):
        await get(n)
    assert hosts.list_files() == sorted([digests[0], digests[2], digests[3]])
    assert sum_counters(mesh)["found"] == 1


async def store_some_chunks(hosts: Hosts, receiver: WeightReceiver) -> list[str]:
    """Store two chunks of the version, long unused, and two others in constant use."""
    image = VersionImage(await receiver.fetch_manifest(hosts.digest))
    version_chunks, others = list(image.chunk_sizes)[:2], [bytes([n]) * CHUNK for n in range(2)]
    for content in (*map(hosts.store.read, version_chunks), *others):
        hosts.cache.write(content)
    for content in others:
        future_s = hosts.meshes[0].clock.wall() + 1000
        os.utime(hosts.cache.chunk_path(compute_digest(content)), (future_s, future_s))
    return version_chunks


async def test_chunks_of_the_version_are_evicted_last(hosts: Hosts) -> None:
    mesh, receiver = await hosts.receiver("engine/g0", "second", chunks_bytes=4 * CHUNK)
    await store_some_chunks(hosts, receiver)
    image = await receiver.receive(hosts.digest)
    assert is_complete(image) and hosts.list_files() == sorted(image.chunk_sizes)
    counters = sum_counters(mesh)
    assert (counters["found"], counters["fetched"]) == (2, 2)


async def test_version_beyond_the_free_cache_space_evicts_nothing(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "second", chunks_bytes=3 * CHUNK)
    version_chunks = await store_some_chunks(hosts, receiver)
    with capture_logs() as lines:
        for _ in range(2):
            image = await receiver.receive(hosts.digest)
            assert (
                is_complete(image)
                and image._copied_chunks
                and image._copied_chunks.isdisjoint(version_chunks)
            )
    [warning] = [
        line for line in lines if line["event"].startswith("no disk space for weights: each")
    ]
    assert warning["log_level"] == "warning"


async def test_only_unused_chunks_are_removed(hosts: Hosts) -> None:
    mesh, receiver = await hosts.receiver("engine/g0", "second")
    await receiver.receive(hosts.digest)
    used, unused, *_ = all_names = hosts.list_files()
    long_ago = mesh.clock.wall() - 2 * MAX_UNUSED_S
    (scratch := hosts.cache.chunk_path(used).with_name(f".{used}.of-one-that-was-killed")).touch()
    for path in (*map(hosts.cache.chunk_path, (used, unused)), scratch):
        os.utime(path, (long_ago, long_ago))

    async def fetch() -> bytes:
        raise NotFound("nobody needs to ask")

    assert compute_digest(await fetch_through_cache(mesh, used, fetch)) == used
    remove_unused(hosts.root / "second", mesh.clock.wall())
    assert hosts.list_files() == sorted({*all_names} - {unused})
    remove_unused(hosts.root / "head", mesh.clock.wall())
    assert hosts.store.has(unused)


class FastClock(SystemClock):
    """Clock on which every pause appears much longer than it is."""

    offset_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.offset_s

    async def sleep(self, seconds: float) -> None:
        self.offset_s += seconds * 100
        await super().sleep(0)


async def test_wait_for_a_stalled_fetch_is_bounded(hosts: Hosts) -> None:
    content = b"a chunk"
    lock = hosts.cache.directory / ".locks" / compute_digest(content)[:2]
    lock.parent.mkdir(parents=True)
    settings = hosts.process("engine/g0", "second").settings
    fast_mesh = on_sockets("engine/g1", hosts.state, FastClock(), settings=settings)
    hosts.meshes.append(fast_mesh)

    async def fetch() -> bytes:
        return content

    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        async with asyncio.timeout(scaled(60)):
            assert await fetch_through_cache(fast_mesh, compute_digest(content), fetch) == content
    assert hosts.list_files() == [compute_digest(content)]


async def test_next_process_fetches_after_a_failure_or_cancellation(hosts: Hosts) -> None:
    mesh, content, requested = hosts.process("engine/g0", "second"), b"a chunk", asyncio.Event()

    async def hang() -> bytes:
        requested.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> bytes:
        raise NotFound("the store does not have it")

    async def fetch() -> bytes:
        return content

    hanging = asyncio.create_task(fetch_through_cache(mesh, compute_digest(content), hang))
    await requested.wait()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    with pytest.raises(NotFound):
        await fetch_through_cache(mesh, compute_digest(content), fail)
    assert await fetch_through_cache(mesh, compute_digest(content), fetch) == content
    assert sum_counters(mesh)["fetched"] == 1 and hosts.list_files() == [compute_digest(content)]
