"""Bulk transfer of chunks and files by digest: durable, verified, and resumed over TCP."""

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
CORRUPT_CONTENT = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
SETTINGS = MeshSettings("memory://", "", host="", secret="5e" * 32)
PART = 200_000


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BulkServer]:
    chunks = ChunkStore(tmp_path / "chunks")
    server = BulkServer(
        chunks, SystemHost(), "tcp://127.0.0.1:*", authenticator=InProcessAuthenticator()
    )
    yield server
    server.close()


@pytest.fixture
async def client(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS))


def entry(server: BulkServer, host: str = "another host") -> RegistryEntry:
    return RegistryEntry("store", "test", bulk=server.address, host=host)


@pytest.mark.parametrize("host", ["", "another host"])
async def test_stored_chunks_are_fetched(server: BulkServer, client: BulkClient, host: str) -> None:
    for content in (CONTENT, b"", b"x"):
        digest = await client.put_chunk(entry(server, host), content)
        assert digest == compute_digest(content)
        assert await client.put_chunk(entry(server, host), content) == digest
        assert await client.fetch_chunk(entry(server, host), digest) == content


@pytest.mark.parametrize("host", ["", "another host"])
async def test_missing_and_corrupt_chunks_raise_errors(
    server: BulkServer, client: BulkClient, host: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="no chunk"):
        await client.fetch_chunk(entry(server, host), "0" * 64)
    digest = await client.put_chunk(entry(server, host), CONTENT)
    path = ChunkStore(tmp_path / "chunks").chunk_path(digest)
    path.write_bytes(CORRUPT_CONTENT)
    with pytest.raises(CorruptData):
        await client.fetch_chunk(entry(server, host), digest)
    assert await client.put_chunk(entry(server, host), CONTENT) == digest
    assert await client.fetch_chunk(entry(server, host), digest) == CONTENT
    quarantined_path = tmp_path / "chunks/quarantine" / digest[:2] / digest
    assert quarantined_path.read_bytes() == CORRUPT_CONTENT


@pytest.mark.parametrize("host", ["", "another host"])
async def test_full_disk_raises_an_error_and_leaves_no_files(
    server: BulkServer, client: BulkClient, host: str, tmp_path: Path
) -> None:
    with files_up_to(1_000_000), pytest.raises(StorageFull):
        await client.put_chunk(entry(server, host), CONTENT)
    assert [p for p in (tmp_path / "chunks").rglob("*") if p.is_file()] == []
    digest = await client.put_chunk(entry(server, host), CONTENT)
    assert await client.fetch_chunk(entry(server, host), digest) == CONTENT


@pytest.mark.parametrize("host", ["", "another host"])
async def test_oversized_chunk_is_rejected_at_once(join: Join, tmp_path: Path, host: str) -> None:
    chunks = ChunkStore(tmp_path / "chunks")
    authenticator = InProcessAuthenticator()
    server = BulkServer(
        chunks, SystemHost(), "tcp://127.0.0.1:*", authenticator=authenticator, max_bytes=1000
    )
    client = BulkClient(await join("client", settings=SETTINGS), max_bytes=1000)
    with pytest.raises(Refused, match="1001 bytes; the limit of the bulk port is 1000") as refused:
        await client.put_chunk(entry(server, host), bytes(1001))
    assert not refused.value.retryable and "in pieces" in refused.value.fix
    digest = await client.put_chunk(entry(server, host), bytes(1000))
    assert await client.fetch_chunk(entry(server, host), digest) == bytes(1000)
    server.close()


async def test_absent_server_is_a_lost_peer_and_silence_a_deadline(client: BulkClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded):
            remote = RegistryEntry("s", "test", bulk=f"tcp://127.0.0.1:{port}", host="far")
            await client.fetch_chunk(remote, "0" * 64, deadline_s=0.2)
    for bulk in (f"tcp://127.0.0.1:{port}", "#/nowhere"):
        with pytest.raises(PeerLost):
            await client.fetch_chunk(RegistryEntry("s", "test", bulk=bulk, host="far"), "0" * 64)


def test_chunk_that_is_written_again_is_not_deleted(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path)
    old_digest, rewritten_digest = chunks.write(b"old"), chunks.write(b"again")
    for digest in (old_digest, rewritten_digest):
        os.utime(chunks.chunk_path(digest), (1000, 1000))
    old_chunks = chunks.find_older_than(60, 5000)
    assert (
        old_chunks == chunks.read_write_times([old_digest, rewritten_digest, "0" * 64])
        and len(old_chunks) == 2
    )
    assert chunks.find_older_than(60, 1050) == {}
    chunks.write(b"again")
    chunks.delete_unchanged(old_chunks)
    assert not chunks.has(old_digest) and chunks.read(rewritten_digest) == b"again"


def test_chunks_of_an_earlier_version_are_rejected_and_never_deleted(tmp_path: Path) -> None:
    chunks, earlier = ChunkStore(tmp_path), "ab" * 16
    chunk_path = tmp_path / earlier[:2] / earlier
    chunk_path.parent.mkdir()
    chunk_path.write_bytes(b"content")
    os.utime(chunk_path, (1000, 1000))
    with pytest.raises(Refused, match=r"earlier version of MeshRL.*meshrl export"):
        chunks.read(earlier)
    assert chunks.find_older_than(60, 5000) == chunks.read_write_times([earlier]) == {}
    assert chunk_path.read_bytes() == b"content"


def test_chunk_written_again_during_its_deletion_is_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, rename = ChunkStore(tmp_path), os.rename
    digest = chunks.write(b"content")
    os.utime(chunks.chunk_path(digest), (1000, 1000))

    def rename_after_write(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        assert chunks.write(b"content") == digest
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_write)
    chunks.delete_unchanged(chunks.read_write_times([digest]))
    assert os.rename is rename and chunks.read(digest) == b"content"
    assert [path.name for path in tmp_path.glob("??/*")] == [digest]


def test_invalid_digest_never_becomes_a_path(tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "0" * 31, "Z" * 32, ""):
        with pytest.raises(BadMessage):
            ChunkStore(tmp_path).chunk_path(name)


def write_corrupt_chunk(chunks: ChunkStore) -> tuple[str, Path]:
    path = chunks.chunk_path(digest := chunks.write(b"content"))
    path.write_bytes(b"c0ntent")
    return digest, path


def test_corrupt_chunk_is_quarantined_once(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path)
    digest, path = write_corrupt_chunk(chunks)
    with path.open("rb"):
        is_valid, quarantined_path = chunks.verify_or_quarantine(digest)
    assert (
        not is_valid
        and quarantined_path is not None
        and quarantined_path.read_bytes() == b"c0ntent"
    )
    assert chunks.verify_or_quarantine(digest) == (False, None)
    assert chunks.write(b"content") == digest
    assert chunks.verify_or_quarantine(digest) == (True, None) and chunks.read(digest) == b"content"
    path.write_bytes(b"")
    assert chunks.write(b"content") == digest, "a process with the bytes writes them again"
    assert chunks.read(digest) == b"content"
    reported = [
        (Path(reported["path"]), Path(reported["aside"]).name)
        for reported, _ in chunks.pending_events
    ]
    assert reported == [(path, f"{digest}.1")]


def test_chunk_written_again_during_its_quarantine_is_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, quarantine = ChunkStore(tmp_path), corruption.quarantine
    digest, _ = write_corrupt_chunk(chunks)

    def quarantine_after_write(path: Path, root: Path) -> Path:
        monkeypatch.setattr(corruption, "quarantine", quarantine)
        assert chunks.write(b"content") == digest
        return quarantine(path, root)

    monkeypatch.setattr(corruption, "quarantine", quarantine_after_write)
    assert chunks.verify_or_quarantine(digest) == (True, None)
    assert chunks.read(digest) == b"content"
    assert [file.read_bytes() for file in tmp_path.glob("quarantine/*/*")] == [b"c0ntent"]


@pytest.fixture
async def client_in_parts(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS), part_bytes=PART)


def list_files(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.name for path in paths if path.name != RECORD_FILE)


async def fetch(
    client_in_parts: BulkClient, remote: RegistryEntry, digest: str, target: Path
) -> None:
    with PartialFile.for_file(target, digest) as partial:
        await client_in_parts.fetch_to_file(remote, partial)


@pytest.mark.parametrize("host", ["", "another host"])
@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART, 3_000_000])
async def test_stored_file_is_fetched(
    server: BulkServer, client_in_parts: BulkClient, host: str, size: int, tmp_path: Path
) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT[:size])
    for _ in range(2):
        assert await client_in_parts.put_file(entry(server, host), source) == compute_digest(
            CONTENT[:size]
        )
    target = tmp_path / "new" / "target"
    await fetch(client_in_parts, entry(server, host), compute_digest(CONTENT[:size]), target)
    assert target.read_bytes() == CONTENT[:size]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert list_files(tmp_path / "new") == ["target"]
    assert list_files(tmp_path / "chunks") == [compute_digest(CONTENT[:size])]


@pytest.mark.parametrize("host", ["", "another host"])
async def test_failed_fetches_leave_no_file(
    server: BulkServer, client_in_parts: BulkClient, host: str, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "target"
    with pytest.raises(NotFound):
        await fetch(client_in_parts, entry(server, host), "0" * 64, target)
    digest = await client_in_parts.put_chunk(entry(server, host), CONTENT)
    with files_up_to(1_000_000), pytest.raises(StorageFull):
        await fetch(client_in_parts, entry(server, host), digest, target)
    ChunkStore(tmp_path / "chunks").chunk_path(digest).write_bytes(CORRUPT_CONTENT)
    with pytest.raises(CorruptData):
        await fetch(client_in_parts, entry(server, host), digest, target)
    assert list_files(tmp_path / "new") == []
    (source := tmp_path / "source").write_bytes(CONTENT)
    assert await client_in_parts.put_file(entry(server, host), source) == digest
    await fetch(client_in_parts, entry(server, host), digest, target)
    assert target.read_bytes() == CONTENT


@contextmanager
def serve_through_proxy(
    chunks: Path, max_bytes: int
) -> Iterator[tuple[FaultyProxy, RegistryEntry]]:
    """Yield a proxy and the registry entry of a server behind it, whose address is the proxy's."""
    server = BulkServer(
        ChunkStore(chunks),
        SystemHost(),
        "tcp://127.0.0.1:*",
        "127.0.0.2",
        authenticator=InProcessAuthenticator(),
    )
    with FaultyProxy(int(server.address.partition("#")[0].rpartition(":")[2]), max_bytes) as proxy:
        yield proxy, entry(server)
    server.close()


async def test_broken_transfers_resume_where_they_stopped(
    client_in_parts: BulkClient, tmp_path: Path
) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT)
    with serve_through_proxy(tmp_path / "chunks", max_bytes=700_000) as (proxy, remote):
        digest = await client_in_parts.put_file(remote, source)
        put_bytes, connections = proxy.carried_bytes, proxy.connections
        await fetch(client_in_parts, remote, digest, target := tmp_path / "new" / "target")
    assert target.read_bytes() == CONTENT and list_files(tmp_path / "new") == ["target"]
    assert list_files(tmp_path / "chunks") == [digest]
    min_connections = len(CONTENT) // proxy.max_bytes + 1
    assert connections >= min_connections and proxy.connections - connections >= min_connections
    # a part is sent again from where it broke, and unread bytes are lost
    repeated_bytes = min_connections * 2 * PART
    assert (
        put_bytes < len(CONTENT) + repeated_bytes
        and proxy.carried_bytes - put_bytes < len(CONTENT) + repeated_bytes
    )


async def test_repeatedly_broken_connection_is_a_lost_peer(
    client_in_parts: BulkClient, tmp_path: Path
) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT)
    with serve_through_proxy(tmp_path / "chunks", max_bytes=PART // 2) as (proxy, remote):
        with pytest.raises(PeerLost):
            await client_in_parts.put_file(remote, source)
        assert proxy.connections == MAX_BREAKS
        digest = ChunkStore(tmp_path / "chunks").write(CONTENT)
        proxy.max_bytes = 0
        with pytest.raises(PeerLost):
            await fetch(client_in_parts, remote, digest, tmp_path / "new" / "target")
    assert list_files(tmp_path / "new") == []


async def test_cancelled_fetch_leaves_no_files(client_in_parts: BulkClient, tmp_path: Path) -> None:
    digest = ChunkStore(tmp_path / "chunks").write(CONTENT)
    target = tmp_path / "new" / "target"
    with serve_through_proxy(tmp_path / "chunks", max_bytes=1 << 30) as (proxy, remote):
        proxy.stall_at_bytes = 1_000_000
        fetching = asyncio.create_task(fetch(client_in_parts, remote, digest, target))
        await until(lambda: proxy.carried_bytes >= proxy.stall_at_bytes)
        assert list_files(tmp_path / "new") != []
        await cancel(fetching)
        assert list_files(tmp_path / "new") == []
        # until the client's thread has closed its socket
        await until(lambda: not proxy.open_connections, 20)
    assert list_files(tmp_path / "new") == []


def test_chunk_committed_twice_is_stored_once(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path)
    with PartialFile.for_chunk(chunks, compute_digest(CONTENT)) as partial:
        partial.write(CONTENT)
        partial.commit()
        partial.commit()
    assert chunks.read(compute_digest(CONTENT)) == CONTENT
    assert list_files(tmp_path) == [compute_digest(CONTENT)]


def test_abandoned_uploads_are_discarded(tmp_path: Path) -> None:
    now = 0.0
    uploads = ParkedUploads(lambda: now)
    chunks = ChunkStore(tmp_path)
    for position in range(1, MAX_PARKED + 3):
        partial = PartialFile.for_chunk(chunks, f"{position % 2:064x}")
        partial.write(bytes(position))
        uploads.park("", partial)
    assert len(list_files(tmp_path)) == MAX_PARKED
    last_upload = uploads.take("", f"{0:064x}")
    assert last_upload is not None and last_upload.received_bytes == MAX_PARKED + 2
    now = PARKED_TIMEOUT_S + 1
    uploads.discard_expired()
    assert len(list_files(tmp_path)) == 1 and uploads.take("", f"{1:064x}") is None
    last_upload.discard()
    assert list_files(tmp_path) == []


def test_server_takes_a_free_port_of_its_range(tmp_path: Path) -> None:
    def start_server(ports: str) -> BulkServer:
        authenticator = InProcessAuthenticator()
        return BulkServer(
            ChunkStore(tmp_path),
            SystemHost(),
            f"tcp://127.0.0.1:{ports}",
            authenticator=authenticator,
        )

    first = start_server("*")
    first_port = int(first.address.partition("#")[0].rpartition(":")[2])
    servers = [first]
    try:
        with pytest.raises(ConfigError, match="no port is free to serve chunks"):
            start_server(str(first_port))
        servers.append(start_server(f"{first_port}-{min(first_port + 20, 65535)}"))
        second_port = int(servers[1].address.partition("#")[0].rpartition(":")[2])
        assert first_port < second_port <= first_port + 20
    finally:
        for server in servers:
            server.close()
