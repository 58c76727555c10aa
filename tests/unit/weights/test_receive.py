"""Versions opened on a host: hashed once for all of its processes, rejected if corrupt."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from loadtests.weights.contents import staged_whole
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.errors import BadMessage, CorruptData, NotFound, PeerLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore
from meshrl.common.weights.chunks import verified_files
from meshrl.common.weights.chunks.chunk_store import try_lock
from meshrl.common.weights.chunks.verified_files import RECORD_FILE, TRUST_DURATION_S, VerifiedFiles
from meshrl.common.weights.layout.manifest import RowRange
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.transports.version_fetcher import VersionFetcher
from meshrl.services.weights.export import read_tensors
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.unit.weights.store_processes import ProcessesOnHosts, Store

CHUNK = 64 << 10
TENSORS = {
    "embedding": torch.arange(5 * CHUNK // 8, dtype=torch.float32).reshape(-1, 64),
    "layers.0.down": torch.arange(3 * CHUNK // 4, dtype=torch.bfloat16).reshape(64, -1),
    "norm": torch.ones(7),
}
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


class Hosts(ProcessesOnHosts):
    """A store, and processes on its host or elsewhere."""

    digest: str

    async def stage(self, tensors: dict[str, torch.Tensor], version: int = 0) -> str:
        return await staged_whole(
            self.trainer, BulkClient(self.trainer), "j", 0, version, tensors, most=CHUNK
        )


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    bench = Hosts(tmp_path, open_simulated_state(SystemClock()))
    bench.store.directory.mkdir(parents=True)
    async with bench.run_store():
        bench.digest = await bench.stage(TENSORS)
        yield bench


def is_complete(image: VersionImage) -> bool:
    return image.tensors.keys() == TENSORS.keys() and all(
        torch.equal(image.tensors[name], tensor) for name, tensor in TENSORS.items()
    )


def sum_hashed_bytes(*meshes: Mesh) -> float:
    return sum(mesh.telemetry.counters.get("chunks_hashed_bytes", 0) for mesh in meshes)


@pytest.mark.parametrize("host", ["head", "second"])
async def test_version_is_hashed_when_stored_and_mapped_by_all(hosts: Hosts, host: str) -> None:
    receivers = [await hosts.receiver(f"engine/g{n}", host) for n in range(3)]
    images = await asyncio.gather(*(one.receive(hosts.digest) for _, one in receivers))
    assert all(map(is_complete, images)) and all(image.joined_bytes == 0 for image in images)
    assert sum_hashed_bytes(*(mesh for mesh, _ in receivers)) == 0
    mesh, late = await hosts.receiver("engine/g3", host)
    assert (
        is_complete(await late.receive(hosts.digest, rehash=True))
        and sum_hashed_bytes(mesh) == SIZE
    )


def save_again(chunks: ChunkStore, digest: str) -> bool:
    chunks.chunk_path(digest).unlink()
    chunks.save(digest, b"content")
    return True


@pytest.mark.parametrize("change", [ChunkStore.mark_used, ChunkStore.mark_written, save_again])
def test_chunk_stays_locked_until_its_new_time_is_recorded(
    tmp_path: Path, change: Callable[[ChunkStore, str], bool]
) -> None:
    is_free: list[bool] = []

    def read_clock() -> float:
        if chunks.has(digest):
            with chunks.open(digest) as file:
                is_free.append(try_lock(file.fileno()))
        return 1e9

    chunks = ChunkStore(tmp_path)
    digest = chunks.write(b"content")
    chunks = ChunkStore(tmp_path, read_clock)
    assert change(chunks, digest) and is_free and not any(is_free)
    with chunks.open(digest) as file:
        assert try_lock(file.fileno())


def test_chunk_that_others_lock_keeps_its_time_when_used(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path)
    digest = chunks.write(b"content")
    chunks.record_verified(digest)
    with chunks.open(digest) as file:
        assert try_lock(file.fileno())
        before = os.stat(file.fileno())
        assert chunks.mark_used(digest)
        assert os.stat(file.fileno()) == before and chunks.is_verified(digest, before)


async def test_version_without_a_record_is_hashed_once_per_host(hosts: Hosts) -> None:
    (hosts.store.directory / RECORD_FILE).unlink()
    receivers = [await hosts.receiver(f"engine/g{n}", "head") for n in range(3)]
    assert all(
        map(is_complete, await asyncio.gather(*(one.receive(hosts.digest) for _, one in receivers)))
    )
    assert sum_hashed_bytes(*(mesh for mesh, _ in receivers)) == SIZE


@pytest.mark.rotating(3)
async def test_modified_file_is_hashed_again(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "head")
    image = await receiver.receive(hosts.digest)
    path = hosts.store.chunk_path(corrupt_digest := next(iter(image.chunk_sizes)))
    first = path.read_bytes()[0]
    with path.open("r+b") as file:
        file.write(bytes([first ^ 1]))
    with pytest.raises(CorruptData, match="not match its digest"):
        await receiver.receive(hosts.digest)
    assert not hosts.store.has(corrupt_digest)  # the store has quarantined it
    with pytest.raises(NotFound):
        await receiver.receive(hosts.digest)
    assert await hosts.stage(TENSORS) == hosts.digest
    assert is_complete(await receiver.receive(hosts.digest))


@pytest.mark.parametrize("host", ["head", "second"])
async def test_version_deleted_during_its_fetch_leaves_nothing_behind(
    hosts: Hosts, host: str
) -> None:
    """Check that the failed fetch leaves no files and that a process with an open image keeps
    it.
    """
    _, receiver = await hosts.receiver("engine/g0", "head")
    image = await receiver.receive(hosts.digest)
    for digest in image.chunk_sizes:
        hosts.store.chunk_path(digest).unlink()
    _, late = await hosts.receiver("engine/g1", host)
    with pytest.raises(NotFound):
        await late.receive(hosts.digest)
    assert is_complete(image)
    newest = await hosts.stage({"norm": torch.zeros(7)}, version=1)
    assert torch.equal((await late.receive(newest)).tensors["norm"], torch.zeros(7))


class FailingTransport:
    """Transport that always fails."""

    name = "pull"

    async def publish(self, manifest: str) -> None:
        raise PeerLost("nobody is there")

    async def receive(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        raise PeerLost("nobody is there")


async def test_chunks_fetched_singly_are_mapped_from_the_cache(hosts: Hosts) -> None:
    mesh, _ = await hosts.receiver("engine/g0", "second")
    receiver = WeightReceiver(mesh, BulkClient(mesh), VersionFetcher(mesh, [FailingTransport()]))
    image = await receiver.receive(hosts.digest)
    assert is_complete(image) and not image._copied_chunks


async def test_host_without_cache_space_warns_once(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "second", chunks_bytes=2 * CHUNK)
    with capture_logs() as lines:
        for _ in range(3):
            image = await receiver.receive(hosts.digest)
            assert is_complete(image) and image._copied_chunks
    [warning] = [
        line for line in lines if line["event"].startswith("no disk space for weights: each")
    ]
    assert warning["log_level"] == "warning"


async def test_process_stalled_while_hashing_is_not_awaited(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "head")
    [one, *_] = (await receiver.fetch_manifest(hosts.digest)).tensors
    with hosts.store.chunk_path(one.chunk).open("rb") as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_EX)
        async with asyncio.timeout(scaled(60)):
            assert is_complete(await receiver.receive(hosts.digest))


async def test_cancelled_receive_leaves_no_lock(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "head")
    [one, *_] = (await receiver.fetch_manifest(hosts.digest)).tensors
    with hosts.store.chunk_path(one.chunk).open("rb") as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_EX)
        waiting = asyncio.create_task(receiver.receive(hosts.digest))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
    _, other = await hosts.receiver("engine/g1", "head")
    assert is_complete(await other.receive(hosts.digest))


async def test_row_selection_fetches_only_its_chunks(hosts: Hosts) -> None:
    mesh, receiver = await hosts.receiver("rank/0", "second")
    rows = RowRange(0, 0, 10)
    image = await receiver.receive(hosts.digest, {"embedding": rows, "norm": None})
    fetched = mesh.telemetry.counters["chunks_fetched_bytes"]
    assert fetched == sum(image.chunk_sizes.values()) < SIZE
    target = torch.zeros_like(TENSORS["embedding"])
    image.copy_into("embedding", target)
    assert torch.equal(target[:10], TENSORS["embedding"][:10])
    assert torch.equal(image.tensors["norm"], TENSORS["norm"])


async def test_manifest_of_format_1_is_rejected(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("engine/g0", "head")
    manifest = await receiver.fetch_manifest(hosts.digest)
    pieces = [replace(piece, dim=0, begin=0, end=-1) for piece in manifest.tensors]
    old = replace(manifest, tensors=pieces, format=1, sha256="", image="", version=7)
    with pytest.raises(BadMessage, match="format 1"):
        await receiver.receive(hosts.store.write(pack(old)))


async def test_version_is_read_without_loading_it_at_once(hosts: Hosts) -> None:
    _, receiver = await hosts.receiver("trainer/k", "head")
    source = await receiver.open_tensor_source(hosts.digest)
    for name in TENSORS:
        tensors = await source.read_tensors([name])
        assert torch.equal(tensors[name], TENSORS[name])
        assert measure_resident_bytes(hosts.store.directory) <= TENSORS[name].nbytes + 4 * CHUNK


def measure_resident_bytes(directory: Path) -> int:
    """Return the bytes of files below a path that are in this process's memory."""
    resident_bytes, is_below = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_below = str(directory) in line
        elif is_below and line.startswith("Rss:"):
            resident_bytes += int(line.split()[1]) * 1024
    return resident_bytes


def test_verification_record_is_bound_to_file_boot_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    one, other = (VerifiedFiles(tmp_path / RECORD_FILE, lambda: now[0]) for _ in range(2))
    path = tmp_path / "chunk"
    path.write_bytes(b"content")
    one.record("digest", path)
    assert one.is_verified("digest", path.stat()) and other.is_verified("digest", path.stat())
    assert not one.is_verified("another", path.stat())
    for offset_s, trusted in (
        (TRUST_DURATION_S, True),
        (TRUST_DURATION_S + 1, False),
        (-1.0, False),
    ):
        now[0] = 1000.0 + offset_s
        assert (
            one.is_verified("digest", path.stat())
            == other.is_verified("digest", path.stat())
            == trusted
        )
    now[0] = 1000.0
    monkeypatch.setattr(verified_files, "BOOT_ID_PATH", tmp_path / "boot")
    (tmp_path / "boot").write_text("another one\n")
    assert not VerifiedFiles(tmp_path / RECORD_FILE, lambda: 1000.0).is_verified(
        "digest", path.stat()
    )
    stat = path.stat()
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not one.is_verified("digest", path.stat()) and not other.is_verified(
        "digest", path.stat()
    )


@pytest.mark.parametrize("harm", [b"", b"half a li", b"\xff\xfe\n\n \n", b"digest 1 2 3 4 5 6\n"])
def test_invalid_record_lines_verify_nothing(tmp_path: Path, harm: bytes) -> None:
    (tmp_path / RECORD_FILE).write_bytes(harm)
    path = tmp_path / "chunk"
    path.write_bytes(b"content")
    known = VerifiedFiles(tmp_path / RECORD_FILE, lambda: 1000.0)
    assert not known.is_verified("digest", path.stat())
    known.record("digest", path)
    known.record("digest", path)  # a torn line hides the first record
    assert VerifiedFiles(tmp_path / RECORD_FILE, lambda: 1000.0).is_verified("digest", path.stat())


MAX_BYTES = 1000  # in place of the limits of a chunk and of the bulk port
LARGE = {
    "layers.0.qkv": torch.arange(2500, dtype=torch.float32).reshape(50, 50),
    "layers.1.qkv": torch.arange(999, dtype=torch.bfloat16).reshape(3, 333).T,
    "layers.2.qkv": torch.arange(6, dtype=torch.int64),
    "layers.3.adapters.q_proj.a": torch.arange(300, dtype=torch.float32),
    "one": torch.tensor(7.0),
    "norm": torch.arange(3, dtype=torch.uint8),
}


async def test_tensor_larger_than_the_bulk_limit_is_sent_in_pieces(store: Store) -> None:
    bulk = BulkClient(store.mesh, max_bytes=MAX_BYTES)
    digest = await staged_whole(store.mesh, bulk, "job", 0, 0, LARGE, most=MAX_BYTES)
    image = await WeightReceiver(store.mesh, bulk).receive(digest)
    assert image.tensors.keys() == LARGE.keys()
    for name, tensor in LARGE.items():
        assert image.tensors[name].dtype == tensor.dtype
        assert torch.equal(image.tensors[name], tensor)
    described = image.manifest.tensors
    assert all(store.chunks.chunk_path(t.chunk).stat().st_size <= MAX_BYTES for t in described)
    assert len([t for t in described if t.name == "layers.0.qkv"]) == 10
    exported = read_tensors(store.chunks, digest)
    assert all(torch.equal(exported[name], tensor) for name, tensor in LARGE.items())


async def test_version_is_read_a_few_tensors_at_a_time(store: Store) -> None:
    digest = await staged_whole(store.mesh, store.bulk, "job", 0, 0, LARGE, most=MAX_BYTES)
    version = await WeightReceiver(store.mesh, store.bulk).open_tensor_source(digest)
    assert sorted(version.meta_tensors) == sorted(LARGE)
    for names in (["one", "layers.0.qkv"], list(version.meta_tensors)):
        tensors = await version.read_tensors(names)
        assert list(tensors) == names
        assert all(torch.equal(tensors[name], LARGE[name]) for name in names)
        assert all(tensors[name].dtype == version.meta_tensors[name].dtype for name in names)
