"""Chunks and files by digest: durable, checked, and resumed over TCP."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import (
    BadMessage,
    ConfigError,
    CorruptData,
    DeadlineExceeded,
    NotFound,
    PeerLost,
    Refused,
    StorageFull,
)
from meshrl.common.base.files import corruption
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.bulk.transfer import MAX_BREAKS
from meshrl.common.weights.chunks.partial_file import (
    MAX_PARKED,
    PARKED_TIMEOUT_S,
    ParkedUploads,
    PartialFile,
)
from meshrl.common.weights.chunks.verified_files import RECORD_FILE
from tests.unit.common.base.files.harms import files_up_to
from tests.unit.common.mesh.runtime.talking import Join, cancel, until
from tests.unit.common.weights.bulk.faulty_proxy import FaultyProxy

CONTENT = os.urandom(3_000_000)
SETTINGS = MeshSettings("memory://", "", host="", secret="5e" * 32)
PART = 200_000


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BulkServer]:
    chunks = ChunkStore(tmp_path / "chunks")
    made = BulkServer(
        chunks, SystemHost(), "tcp://127.0.0.1:*", authenticator=InProcessAuthenticator()
    )
    yield made
    made.close()


@pytest.fixture
async def client(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS))


def entry(server: BulkServer, host: str = "another host") -> RegistryEntry:
    return RegistryEntry("store", "test", bulk=server.address, host=host)


@pytest.mark.parametrize("host", ["", "another host"])
async def test_what_was_put_is_got(server: BulkServer, client: BulkClient, host: str) -> None:
    for content in (CONTENT, b"", b"x"):
        digest = await client.put_chunk(entry(server, host), content)
        assert digest == compute_digest(content)
        assert await client.put_chunk(entry(server, host), content) == digest
        assert await client.fetch_chunk(entry(server, host), digest) == content


@pytest.mark.parametrize("host", ["", "another host"])
async def test_what_is_not_there_or_was_changed_is_an_error(
    server: BulkServer, client: BulkClient, host: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="no chunk"):
        await client.fetch_chunk(entry(server, host), "0" * 64)
    digest = await client.put_chunk(entry(server, host), CONTENT)
    path = ChunkStore(tmp_path / "chunks").chunk_path(digest)
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(CorruptData):
        await client.fetch_chunk(entry(server, host), digest)
    assert await client.put_chunk(entry(server, host), CONTENT) == digest
    assert await client.fetch_chunk(entry(server, host), digest) == CONTENT
    kept = tmp_path / "chunks/quarantine" / digest[:2] / digest
    assert kept.read_bytes() == CONTENT[:-1] + b"?"


@pytest.mark.parametrize("host", ["", "another host"])
async def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    server: BulkServer, client: BulkClient, host: str, tmp_path: Path
) -> None:
    with files_up_to(1_000_000), pytest.raises(StorageFull):
        await client.put_chunk(entry(server, host), CONTENT)
    assert [p for p in (tmp_path / "chunks").rglob("*") if p.is_file()] == []
    digest = await client.put_chunk(entry(server, host), CONTENT)
    assert await client.fetch_chunk(entry(server, host), digest) == CONTENT


@pytest.mark.parametrize("host", ["", "another host"])
async def test_what_is_too_large_is_refused_at_once(join: Join, tmp_path: Path, host: str) -> None:
    chunks = ChunkStore(tmp_path / "chunks")
    door = InProcessAuthenticator()
    server = BulkServer(
        chunks, SystemHost(), "tcp://127.0.0.1:*", authenticator=door, max_bytes=1000
    )
    client = BulkClient(await join("client", settings=SETTINGS), max_bytes=1000)
    with pytest.raises(Refused, match="1001 bytes; the bulk port takes 1000") as refused:
        await client.put_chunk(entry(server, host), bytes(1001))
    assert not refused.value.retryable and "in pieces" in refused.value.fix
    digest = await client.put_chunk(entry(server, host), bytes(1000))
    assert await client.fetch_chunk(entry(server, host), digest) == bytes(1000)
    server.close()


async def test_no_server_is_a_lost_peer_and_silence_a_deadline(client: BulkClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded):
            there = RegistryEntry("s", "test", bulk=f"tcp://127.0.0.1:{port}", host="far")
            await client.fetch_chunk(there, "0" * 64, deadline_s=0.2)
    for bulk in (f"tcp://127.0.0.1:{port}", "#/nowhere"):
        with pytest.raises(PeerLost):
            await client.fetch_chunk(RegistryEntry("s", "test", bulk=bulk, host="far"), "0" * 64)


def test_a_chunk_that_is_written_again_is_not_deleted(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path)
    old, again = chunks.write(b"old"), chunks.write(b"again")
    for digest in (old, again):
        os.utime(chunks.chunk_path(digest), (1000, 1000))
    found = chunks.find_older_than(60, 5000)
    assert found == chunks.read_write_times([old, again, "0" * 64]) and len(found) == 2
    assert chunks.find_older_than(60, 1050) == {}
    chunks.write(b"again")
    chunks.delete_unchanged(found)
    assert not chunks.has(old) and chunks.read(again) == b"again"


def test_chunks_of_an_earlier_version_are_refused_and_never_deleted(tmp_path: Path) -> None:
    chunks, earlier = ChunkStore(tmp_path), "ab" * 16
    place = tmp_path / earlier[:2] / earlier
    place.parent.mkdir()
    place.write_bytes(b"content")
    os.utime(place, (1000, 1000))
    with pytest.raises(Refused, match=r"earlier version of MeshRL.*meshrl export"):
        chunks.read(earlier)
    assert chunks.find_older_than(60, 5000) == chunks.read_write_times([earlier]) == {}
    assert place.read_bytes() == b"content"


def test_a_chunk_that_is_written_again_while_it_is_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, rename = ChunkStore(tmp_path), os.rename
    digest = chunks.write(b"content")
    os.utime(chunks.chunk_path(digest), (1000, 1000))

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        assert chunks.write(b"content") == digest
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    chunks.delete_unchanged(chunks.read_write_times([digest]))
    assert os.rename is rename and chunks.read(digest) == b"content"
    assert [path.name for path in tmp_path.glob("??/*")] == [digest]


def test_a_name_that_is_no_digest_never_becomes_a_path(tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "0" * 31, "Z" * 32, ""):
        with pytest.raises(BadMessage):
            ChunkStore(tmp_path).chunk_path(name)


def damaged(chunks: ChunkStore) -> tuple[str, Path]:
    path = chunks.chunk_path(digest := chunks.write(b"content"))
    path.write_bytes(b"c0ntent")
    return digest, path


def test_two_who_find_a_chunk_damaged_set_it_aside_once(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path)
    digest, path = damaged(chunks)
    with path.open("rb"):
        whole, aside = chunks.verify_or_quarantine(digest)
    assert not whole and aside is not None and aside.read_bytes() == b"c0ntent"
    assert chunks.verify_or_quarantine(digest) == (False, None)
    assert chunks.write(b"content") == digest
    assert chunks.verify_or_quarantine(digest) == (True, None) and chunks.read(digest) == b"content"
    path.write_bytes(b"")
    assert chunks.write(b"content") == digest, "whoever has the bytes writes them again"
    assert chunks.read(digest) == b"content"
    told = [(Path(told["path"]), Path(told["aside"]).name) for told, _ in chunks.pending_events]
    assert told == [(path, f"{digest}.1")]


def test_what_is_written_again_while_somebody_finds_it_damaged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, set_aside = ChunkStore(tmp_path), corruption.quarantine
    digest, _ = damaged(chunks)

    def late(path: Path, root: Path) -> Path:
        monkeypatch.setattr(corruption, "quarantine", set_aside)
        assert chunks.write(b"content") == digest
        return set_aside(path, root)

    monkeypatch.setattr(corruption, "quarantine", late)
    assert chunks.verify_or_quarantine(digest) == (True, None)
    assert chunks.read(digest) == b"content"
    assert [file.read_bytes() for file in tmp_path.glob("quarantine/*/*")] == [b"c0ntent"]


@pytest.fixture
async def parted(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS), part_bytes=PART)


def files(directory: Path) -> list[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.name for path in found if path.name != RECORD_FILE)


async def fetch(parted: BulkClient, there: RegistryEntry, digest: str, target: Path) -> None:
    with PartialFile.for_file(target, digest) as partial:
        await parted.fetch_to_file(there, partial)


@pytest.mark.parametrize("host", ["", "another host"])
@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART, 3_000_000])
async def test_a_file_that_was_put_is_fetched(
    server: BulkServer, parted: BulkClient, host: str, size: int, tmp_path: Path
) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT[:size])
    for _ in range(2):
        assert await parted.put_file(entry(server, host), source) == compute_digest(CONTENT[:size])
    target = tmp_path / "new" / "target"
    await fetch(parted, entry(server, host), compute_digest(CONTENT[:size]), target)
    assert target.read_bytes() == CONTENT[:size]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert files(tmp_path / "new") == ["target"]
    assert files(tmp_path / "chunks") == [compute_digest(CONTENT[:size])]


@pytest.mark.parametrize("host", ["", "another host"])
async def test_what_is_not_there_or_damaged_or_has_no_room_leaves_no_file(
    server: BulkServer, parted: BulkClient, host: str, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "target"
    with pytest.raises(NotFound):
        await fetch(parted, entry(server, host), "0" * 64, target)
    digest = await parted.put_chunk(entry(server, host), CONTENT)
    with files_up_to(1_000_000), pytest.raises(StorageFull):
        await fetch(parted, entry(server, host), digest, target)
    ChunkStore(tmp_path / "chunks").chunk_path(digest).write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(CorruptData):
        await fetch(parted, entry(server, host), digest, target)
    assert files(tmp_path / "new") == []
    (source := tmp_path / "source").write_bytes(CONTENT)
    assert await parted.put_file(entry(server, host), source) == digest
    await fetch(parted, entry(server, host), digest, target)
    assert target.read_bytes() == CONTENT


@contextmanager
def road(chunks: Path, most: int) -> Iterator[tuple[FaultyProxy, RegistryEntry]]:
    """A server that says it is where the road begins: proofs are good for no other place."""
    made = BulkServer(
        ChunkStore(chunks),
        SystemHost(),
        "tcp://127.0.0.1:*",
        "127.0.0.2",
        authenticator=InProcessAuthenticator(),
    )
    with FaultyProxy(int(made.address.partition("#")[0].rpartition(":")[2]), most) as proxy:
        yield proxy, entry(made)
    made.close()


async def test_what_breaks_goes_on_where_it_was(parted: BulkClient, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT)
    with road(tmp_path / "chunks", most=700_000) as (proxy, there):
        digest = await parted.put_file(there, source)
        put, connections = proxy.carried_bytes, proxy.connections
        await fetch(parted, there, digest, target := tmp_path / "new" / "target")
    assert target.read_bytes() == CONTENT and files(tmp_path / "new") == ["target"]
    assert files(tmp_path / "chunks") == [digest]
    least = len(CONTENT) // proxy.max_bytes + 1
    assert connections >= least and proxy.connections - connections >= least
    again = least * 2 * PART  # a part is sent again where it broke; what was not read is lost
    assert put < len(CONTENT) + again and proxy.carried_bytes - put < len(CONTENT) + again


async def test_a_way_that_stays_broken_is_a_lost_peer(parted: BulkClient, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT)
    with road(tmp_path / "chunks", most=PART // 2) as (proxy, there):
        with pytest.raises(PeerLost):
            await parted.put_file(there, source)
        assert proxy.connections == MAX_BREAKS
        digest = ChunkStore(tmp_path / "chunks").write(CONTENT)
        proxy.max_bytes = 0
        with pytest.raises(PeerLost):
            await fetch(parted, there, digest, tmp_path / "new" / "target")
    assert files(tmp_path / "new") == []


async def test_who_does_not_wait_any_more_leaves_nothing(
    parted: BulkClient, tmp_path: Path
) -> None:
    digest = ChunkStore(tmp_path / "chunks").write(CONTENT)
    target = tmp_path / "new" / "target"
    with road(tmp_path / "chunks", most=1 << 30) as (proxy, there):
        proxy.stall_at_bytes = 1_000_000
        fetching = asyncio.create_task(fetch(parted, there, digest, target))
        await until(lambda: proxy.carried_bytes >= proxy.stall_at_bytes)
        assert files(tmp_path / "new") != []
        await cancel(fetching)
        assert files(tmp_path / "new") == []
        # until the client's thread has closed its socket
        await until(lambda: not proxy.open_connections, 20)
    assert files(tmp_path / "new") == []


def test_what_is_committed_twice_is_there_once(tmp_path: Path) -> None:
    """The parted of a slow disk has gone and come back."""
    chunks = ChunkStore(tmp_path)
    with PartialFile.for_chunk(chunks, compute_digest(CONTENT)) as partial:
        partial.write(CONTENT)
        partial.commit()
        partial.commit()
    assert chunks.read(compute_digest(CONTENT)) == CONTENT
    assert files(tmp_path) == [compute_digest(CONTENT)]


def test_what_nobody_goes_on_with_is_forgotten(tmp_path: Path) -> None:
    now = 0.0
    parked = ParkedUploads(lambda: now)
    chunks = ChunkStore(tmp_path)
    for position in range(1, MAX_PARKED + 3):
        partial = PartialFile.for_chunk(chunks, f"{position % 2:064x}")
        partial.write(bytes(position))
        parked.park("", partial)
    assert len(files(tmp_path)) == MAX_PARKED
    longest = parked.take("", f"{0:064x}")
    assert longest is not None and longest.received_bytes == MAX_PARKED + 2
    now = PARKED_TIMEOUT_S + 1
    parked.discard_expired()
    assert len(files(tmp_path)) == 1 and parked.take("", f"{1:064x}") is None
    longest.discard()
    assert files(tmp_path) == []


def test_a_port_of_a_range_is_the_first_free_one(tmp_path: Path) -> None:
    def serving(ports: str) -> BulkServer:
        door = InProcessAuthenticator()
        return BulkServer(
            ChunkStore(tmp_path), SystemHost(), f"tcp://127.0.0.1:{ports}", authenticator=door
        )

    first = serving("*")
    low = int(first.address.partition("#")[0].rpartition(":")[2])
    servers = [first]
    try:
        with pytest.raises(ConfigError, match="no port to serve chunks from"):
            serving(str(low))
        servers.append(serving(f"{low}-{min(low + 20, 65535)}"))
        found = int(servers[1].address.partition("#")[0].rpartition(":")[2])
        assert low < found <= low + 20
    finally:
        for server in servers:
            server.close()
