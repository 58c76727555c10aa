"""Chunk cache of a host: each chunk crosses the network once for all of its processes. Cached
chunks never hinder other use of the disk.
"""

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
    """A head with a weight store, to which there is one way, and a host with many processes."""

    digest: str

    @property
    def kept(self) -> ChunkStore:
        return ChunkStore(self.root / "second/chunks")

    def files(self) -> list[str]:
        return sorted(path.name for path in self.kept.directory.glob("??/*"))


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    made = Hosts(tmp_path, open_simulated_state(SystemClock()))
    # It publishes the address of the transport: proofs are valid for no other address.
    async with made.served("127.0.0.2"):
        trainer = made.trainer
        bulk_client = BulkClient(trainer)
        made.digest = await staged_whole(trainer, bulk_client, "j", 0, 0, TENSORS, most=CHUNK)
        assert right(await WeightReceiver(trainer, bulk_client).receive(made.digest))
        assert made.proxy.carried_bytes == 0 and not (tmp_path / "head/chunks").exists()
        yield made


def right(image: VersionImage) -> bool:
    return all(torch.equal(image.tensors[name], tensor) for name, tensor in TENSORS.items())


def told(*meshes: Mesh) -> dict[str, float]:
    names = ("found", "found_bytes", "fetched", "fetched_bytes", "damaged", "not_kept")
    counters = [mesh.telemetry.counters for mesh in meshes]
    return {name: sum(c.get(f"chunks_{name}", 0) for c in counters) for name in names}


async def test_processes_of_a_host_fetch_a_version_once_for_all(hosts: Hosts) -> None:
    made = [await hosts.receiver(f"engine/g{n}", "second") for n in range(3)]
    images = await asyncio.gather(*(one.receive(hosts.digest) for _, one in made))
    assert all(map(right, images))
    assert SIZE < hosts.proxy.carried_bytes < SIZE * 1.2
    figures = told(*(mesh for mesh, _ in made))
    assert figures["fetched_bytes"] == SIZE and figures["found_bytes"] == 2 * SIZE
    assert figures["fetched"] == 4 and figures["found"] == 8
    assert len(hosts.files()) == 4
    for name in hosts.files():
        hosts.store.chunk_path(name).unlink()
    _, later = await hosts.receiver("engine/g3", "second")
    assert right(await later.receive(hosts.digest))  # no source is asked again


@pytest.mark.parametrize("harm", ["flipped", "cut", "emptied"])
async def test_a_damaged_one_is_fetched_again_and_never_loaded(hosts: Hosts, harm: str) -> None:
    _, first = await hosts.receiver("engine/g0", "second")
    await first.receive(hosts.digest)
    path = hosts.kept.chunk_path(hosts.files()[0])
    content = path.read_bytes()
    harmed = {
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "cut": content[: CHUNK // 2],
        "emptied": b"",
    }
    path.write_bytes(harmed[harm])
    before = hosts.proxy.carried_bytes
    mesh, second = await hosts.receiver("engine/g1", "second")
    assert right(await second.receive(hosts.digest))
    assert CHUNK < hosts.proxy.carried_bytes - before < CHUNK * 1.5
    figures = told(mesh)
    assert figures["fetched"] == 1 and figures["damaged"] == 1 and figures["found"] == 3
    assert path.read_bytes() == content


@pytest.mark.parametrize("why", ["full", "no directory", "too little", "none"])
async def test_what_cannot_be_kept_is_passed_by(hosts: Hosts, why: str) -> None:
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
            assert right(await receiver.receive(hosts.digest))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    vain = 2 * SIZE if why == "full" else 0  # bytes that arrive before the disk reports an error
    assert 2 * SIZE < hosts.proxy.carried_bytes < 2 * SIZE * 1.2 + vain
    assert hosts.files() == []
    assert told(mesh)["not_kept"] == (0 if why == "none" else 8)


async def test_what_was_not_used_for_longest_makes_room(hosts: Hosts) -> None:
    mesh = hosts.process("engine/g0", "second", chunks_bytes=3 * CHUNK)
    contents = [bytes([n]) * CHUNK for n in range(4)]
    digests = [compute_digest(content) for content in contents]

    async def get(n: int) -> None:
        async def fetch() -> bytes:
            return contents[n]

        assert await fetch_through_cache(mesh, digests[n], fetch) == contents[n]
        used = 1_000_000_000 + next(times)
        os.utime(hosts.kept.chunk_path(digests[n]), (used, used))

    times = iter(range(10))
    for n in (0, 1, 2, 0, 3):
        await get(n)
    assert hosts.files() == sorted([digests[0], digests[2], digests[3]])
    assert told(mesh)["found"] == 1


async def some_there(hosts: Hosts, receiver: WeightReceiver) -> list[str]:
    """Two chunks of the version, long unused, and two others, which are used all the time."""
    image = VersionImage(await receiver.fetch_manifest(hosts.digest))
    found, others = list(image.chunk_sizes)[:2], [bytes([n]) * CHUNK for n in range(2)]
    for content in (*map(hosts.store.read, found), *others):
        hosts.kept.write(content)
    for content in others:
        ahead = hosts.meshes[0].clock.wall() + 1000
        os.utime(hosts.kept.chunk_path(compute_digest(content)), (ahead, ahead))
    return found


async def test_what_a_version_needs_stays_as_long_as_there_is_anything_else(hosts: Hosts) -> None:
    mesh, receiver = await hosts.receiver("engine/g0", "second", chunks_bytes=4 * CHUNK)
    await some_there(hosts, receiver)
    image = await receiver.receive(hosts.digest)
    assert right(image) and hosts.files() == sorted(image.chunk_sizes)
    figures = told(mesh)
    assert (figures["found"], figures["fetched"]) == (2, 2)


async def test_a_version_without_room_beside_what_is_there_removes_none_of_it(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "second", chunks_bytes=3 * CHUNK)
    found = await some_there(hosts, receiver)
    with capture_logs() as lines:
        for _ in range(2):
            image = await receiver.receive(hosts.digest)
            assert right(image) and image._copied_chunks and image._copied_chunks.isdisjoint(found)
    [said] = [line for line in lines if line["event"].startswith("no room for weights: each")]
    assert said["log_level"] == "warning"


async def test_what_nobody_uses_goes_and_what_is_used_stays(hosts: Hosts) -> None:
    mesh, receiver = await hosts.receiver("engine/g0", "second")
    await receiver.receive(hosts.digest)
    used, unused, *_ = names = hosts.files()
    long_ago = mesh.clock.wall() - 2 * MAX_UNUSED_S
    (scratch := hosts.kept.chunk_path(used).with_name(f".{used}.of-one-that-was-killed")).touch()
    for path in (*map(hosts.kept.chunk_path, (used, unused)), scratch):
        os.utime(path, (long_ago, long_ago))

    async def fetch() -> bytes:
        raise NotFound("nobody needs to ask")

    assert compute_digest(await fetch_through_cache(mesh, used, fetch)) == used
    remove_unused(hosts.root / "second", mesh.clock.wall())
    assert hosts.files() == sorted({*names} - {unused})
    remove_unused(hosts.root / "head", mesh.clock.wall())
    assert hosts.store.has(unused)


class Hasty(SystemClock):
    """A clock on which every pause takes much longer than it does."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    async def sleep(self, seconds: float) -> None:
        self.ahead += seconds * 100
        await super().sleep(0)


async def test_one_who_stands_still_as_it_fetches_is_not_waited_for_for_ever(hosts: Hosts) -> None:
    content = b"a chunk"
    lock = hosts.kept.directory / ".locks" / compute_digest(content)[:2]
    lock.parent.mkdir(parents=True)
    settings = hosts.process("engine/g0", "second").settings
    hasty = on_sockets("engine/g1", hosts.state, Hasty(), settings=settings)
    hosts.meshes.append(hasty)

    async def fetch() -> bytes:
        return content

    with lock.open("w") as stands:
        fcntl.flock(stands, fcntl.LOCK_EX)
        async with asyncio.timeout(scaled(60)):
            assert await fetch_through_cache(hasty, compute_digest(content), fetch) == content
    assert hosts.files() == [compute_digest(content)]


async def test_one_who_fails_or_is_cancelled_lets_the_next_fetch(hosts: Hosts) -> None:
    mesh, content, asked = hosts.process("engine/g0", "second"), b"a chunk", asyncio.Event()

    async def stand() -> bytes:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> bytes:
        raise NotFound("the store does not have it")

    async def fetch() -> bytes:
        return content

    standing = asyncio.create_task(fetch_through_cache(mesh, compute_digest(content), stand))
    await asked.wait()
    standing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await standing
    with pytest.raises(NotFound):
        await fetch_through_cache(mesh, compute_digest(content), fail)
    assert await fetch_through_cache(mesh, compute_digest(content), fetch) == content
    assert told(mesh)["fetched"] == 1 and hosts.files() == [compute_digest(content)]
