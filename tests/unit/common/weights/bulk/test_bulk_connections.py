"""Reuse of connections, and rate limits of bulk ports."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import CorruptData, DeadlineExceeded, NotFound, PeerLost, Refused
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.channel import (
    BURST_S,
    MAX_BACKLOG_S,
    MIN_PIECE_BYTES,
    PIECE_DURATION_S,
    RateLimiter,
    RateLimits,
)
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.bulk.transfer import MAX_IDLE_CONNECTIONS
from meshrl.common.weights.chunks.partial_file import PartialFile
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join, until
from tests.unit.common.weights.bulk.faulty_proxy import FaultyProxy

SIZE = 200_000
CONTENTS = [os.urandom(SIZE) for _ in range(4)]
SETTINGS = MeshSettings("memory://", "", host="", secret="5e" * 32)
STALL_S = 0.5  # for transfers that stall
HANG_S = 20.0  # for transfers that complete
SECRET = "5e" * 32
CONTENT = os.urandom(600_000)
RATE = 2_000_000
UNPAID_S = BURST_S + 2 * PIECE_DURATION_S  # the next sender pays for the last piece
# least time that the content takes at this rate, however it is cut
MIN_TRANSFER_S = len(CONTENT) / RATE - UNPAID_S


class Server:
    def __init__(self, root: Path) -> None:
        self.chunks = ChunkStore(root)
        self.digests = [self.chunks.write(content) for content in CONTENTS]
        authenticator, address = InProcessAuthenticator(), "tcp://127.0.0.1:*"
        self.port = BulkServer(
            self.chunks, SystemHost(), address, "127.0.0.2", authenticator=authenticator
        )
        self.entry = RegistryEntry("store", "test", bulk=self.port.address, host="another host")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "chunks")
    yield server
    server.port.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultyProxy]:
    number = int(server.port.address.partition("#")[0].rpartition(":")[2])
    with FaultyProxy(number, 1 << 40) as proxy:
        yield proxy


@pytest.fixture
async def client(join: Join) -> AsyncIterator[BulkClient]:
    client = BulkClient(await join("client", settings=SETTINGS), part_bytes=70_000)
    yield client
    client._connection_pool.close_idle(0.0)


class Target:
    """Chunk store that fetches from the server."""

    def __init__(self, root: Path, client: BulkClient, server: Server) -> None:
        self.chunks = ChunkStore(root / "target")
        self._client, self._server = client, server

    async def fetch(
        self, digest: str, partial: PartialFile | None = None, stall_s: float = HANG_S
    ) -> PartialFile:
        partial = partial or PartialFile.for_chunk(self.chunks, digest, durable=False)
        await self._client.fetch_part(self._server.entry, partial, SIZE, stall_s=scaled(stall_s))
        assert partial.is_valid
        partial.commit()
        partial.discard()
        return partial


@pytest.fixture
def target(tmp_path: Path, client: BulkClient, server: Server) -> Target:
    return Target(tmp_path, client, server)


async def test_successive_chunks_share_one_connection(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    for digest in server.digests:
        await target.fetch(digest)
    with pytest.raises(NotFound):
        await target.fetch("0" * 64)
    await target.fetch(server.digests[0])
    assert proxy.connections == 1
    assert [target.chunks.read(digest) for digest in server.digests] == CONTENTS


async def test_closed_idle_connection_is_replaced(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    await target.fetch(server.digests[0])
    for end in list(proxy.open_connections):
        end.shutdown(2)
    await target.fetch(server.digests[1])
    assert proxy.connections == 2


async def test_broken_transfer_resumes_from_its_partial_file(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    proxy.max_bytes = 120_000
    partial = PartialFile.for_chunk(target.chunks, server.digests[0], durable=False)
    with pytest.raises(PeerLost):
        await target.fetch(partial.digest, partial)
    assert 70_000 < partial.received_bytes < 120_000
    received_bytes, proxy.max_bytes, before = partial.received_bytes, 1 << 40, proxy.carried_bytes
    await target.fetch(partial.digest, partial)
    assert proxy.carried_bytes - before < len(CONTENTS[0]) - received_bytes + 2000
    assert target.chunks.read(partial.digest) == CONTENTS[0]


async def test_stalled_transfer_is_abandoned(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    proxy.stall_at_bytes = 120_000
    partial = PartialFile.for_chunk(target.chunks, server.digests[0], durable=False)
    with pytest.raises(DeadlineExceeded):
        await target.fetch(partial.digest, partial, STALL_S)
    assert 0 < partial.received_bytes < len(CONTENTS[0])
    proxy.stall_at_bytes = 1 << 40
    await target.fetch(partial.digest, partial)
    assert target.chunks.read(partial.digest) == CONTENTS[0]


@pytest.mark.parametrize("size", [0, 5, SIZE - 1, SIZE + 1, 50 * SIZE])
@pytest.mark.parametrize("near", [False, True])
async def test_chunk_of_another_size_is_rejected(
    server: Server, proxy: FaultyProxy, target: Target, client: BulkClient, size: int, near: bool
) -> None:
    partial = PartialFile.for_chunk(target.chunks, server.digests[0], durable=False)
    partial.write(CONTENTS[0][:150_000])
    server.chunks.chunk_path(partial.digest).write_bytes(b"x" * size)
    entry = replace(server.entry, host="") if near else server.entry
    if near and size < SIZE:
        await client.fetch_part(entry, partial, SIZE, stall_s=scaled(HANG_S))
    else:
        with pytest.raises(CorruptData, match="another size"):
            await client.fetch_part(entry, partial, SIZE, stall_s=scaled(HANG_S))
    assert not partial.is_valid and partial.received_bytes <= SIZE and server.port.sent_bytes < SIZE
    partial.discard()


async def test_idle_connections_are_bounded(
    client: BulkClient, server: Server, proxy: FaultyProxy, tmp_path: Path
) -> None:
    digest = server.digests[0]
    for n in range(MAX_IDLE_CONNECTIONS + 4):  # each of them another process for the client
        entry = replace(server.entry, address=str(n))
        with PartialFile.for_file(tmp_path / "target", digest) as partial:
            await client.fetch_part(entry, partial, SIZE, stall_s=scaled(HANG_S))
    assert proxy.connections == MAX_IDLE_CONNECTIONS + 4
    await until(lambda: server.port.connection_count <= MAX_IDLE_CONNECTIONS)
    client._connection_pool.close_idle(0.0)
    await until(lambda: not server.port.connection_count)


async def test_late_thread_writes_nothing_into_a_resumed_transfer(
    client: BulkClient, server: Server, proxy: FaultyProxy, target: Target
) -> None:
    """Check that a thread still in a read writes nothing after its caller gave up."""
    digest = server.digests[0]
    partial = PartialFile.for_chunk(target.chunks, digest, durable=False)
    local_store = ChunkStore(target.chunks.directory.parent / "near")
    pipe_path = local_store.chunk_path(digest)
    pipe_path.parent.mkdir(parents=True)
    os.mkfifo(pipe_path)
    entry = replace(server.entry, host="", bulk=f"#{local_store.directory}")
    late = asyncio.create_task(client.fetch_part(entry, partial, SIZE, stall_s=scaled(HANG_S)))
    writer = await open_for_writing(pipe_path)
    late.cancel()
    await asyncio.wait([late])
    proxy.stall_at_bytes = 120_000
    with pytest.raises(DeadlineExceeded):
        await target.fetch(digest, partial, STALL_S)
    received_bytes, proxy.stall_at_bytes = partial.received_bytes, 1 << 40
    os.write(writer, b"x" * 5000)
    os.close(writer)
    await until(lambda: has_no_reader(pipe_path), 60)
    assert partial.received_bytes == received_bytes > 0
    await target.fetch(digest, partial)
    assert target.chunks.read(digest) == CONTENTS[0]


async def open_for_writing(pipe: Path) -> int:
    """Open the writing end of a pipe as soon as it has a reader."""
    async with asyncio.timeout(scaled(60)):
        while True:
            with suppress(OSError):
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.01)


def has_no_reader(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def test_superseded_writer_is_rejected(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    partial = PartialFile.for_chunk(store, digest := compute_digest(b"one two"), durable=False)
    with partial, partial.take_writer() as first:
        first.write(b"one ")
        with partial.take_writer() as second:
            second.write(b"two")
            for overtaken_call in (
                lambda: first.write(b"two"),
                first.verify_and_commit,
                lambda: first.received_bytes,
            ):
                with pytest.raises(Refused):
                    overtaken_call()
            first.release()  # does not end the second one
            second.verify_and_commit()
        with pytest.raises(Refused):
            second.write(b"more")
    assert store.read(digest) == b"one two"


def test_corrupt_bytes_are_discarded_at_commit(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    partial = PartialFile.for_chunk(store, digest := compute_digest(b"content"), durable=False)
    with partial, partial.take_writer() as writer:
        writer.write(b"contend")
        with pytest.raises(CorruptData, match="arrived corrupt"):
            writer.verify_and_commit()
        assert writer.received_bytes == 0
        writer.write(b"content")
        writer.verify_and_commit()
    assert store.read(digest) == b"content"


def settings(root: Path, **more: Any) -> MeshSettings:
    return MeshSettings("memory://", str(root), host="", secret=SECRET, **more)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., BulkServer]]:
    servers: list[BulkServer] = []

    def start(**more: int) -> BulkServer:
        server_settings = settings(tmp_path / "server", **more)
        chunks, authenticator = ChunkStore(tmp_path / "chunks"), InProcessAuthenticator()
        host, address = SystemHost(), "tcp://127.0.0.1:*"
        servers.append(
            BulkServer(
                chunks,
                host,
                address,
                authenticator=authenticator,
                rates=RateLimits.from_settings(server_settings),
            )
        )
        return servers[-1]

    yield start
    for one in servers:
        one.close()


def entry(server: BulkServer) -> RegistryEntry:
    return RegistryEntry("store", "test", bulk=server.address, host="another host")


def test_several_limiters_of_a_file_share_one_rate(tmp_path: Path) -> None:
    limiters = [RateLimiter(tmp_path / "up", 1_000_000) for _ in range(4)]
    start_s = time.monotonic()
    waits = [limiters[n % 4].charge(10_000) for n in range(100)]
    elapsed_s = time.monotonic() - start_s
    assert 1.0 - BURST_S - elapsed_s <= waits[-1] <= 1.0
    assert waits == sorted(waits) or elapsed_s > 0.01  # each waits behind the previous one
    assert limiters[0].piece_bytes == MIN_PIECE_BYTES


def test_threads_of_one_process_share_the_rate(tmp_path: Path) -> None:
    rate = RateLimiter(tmp_path / "up", 10_000_000)

    def charge_repeatedly() -> None:
        for _ in range(500):
            rate.charge(10_000)

    start_s = time.monotonic()
    threads = [threading.Thread(target=charge_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rate.charge(0) >= 2.0 - BURST_S - (time.monotonic() - start_s)


def test_backlog_of_an_earlier_boot_is_ignored(tmp_path: Path) -> None:
    rate = RateLimiter(tmp_path / "up", 1000)
    rate._free_at[:] = struct.pack("<d", time.monotonic() + 2 * MAX_BACKLOG_S)
    assert rate.charge(10) < 1.0


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_transfers_respect_the_rates_of_both_ends(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path, direction: str
) -> None:
    server = serve(
        rate_up=RATE if direction == "up" else 0, rate_down=RATE if direction == "down" else 0
    )
    unlimited_client = BulkClient(await join("free", settings=settings(tmp_path / "free")))
    start_s = time.monotonic()
    digest = await unlimited_client.put_chunk(entry(server), CONTENT)
    assert direction == "up" or time.monotonic() - start_s >= MIN_TRANSFER_S
    start_s = time.monotonic()
    assert await unlimited_client.fetch_chunk(entry(server), digest) == CONTENT
    assert direction == "down" or time.monotonic() - start_s >= MIN_TRANSFER_S
    open_server = serve()
    own_settings = settings(tmp_path / "bound", **{f"rate_{direction}": RATE})
    limited_client = BulkClient(await join("bound", settings=own_settings))
    start_s = time.monotonic()
    if direction == "up":
        await limited_client.put_chunk(entry(open_server), CONTENT[1:])
    else:
        assert await limited_client.fetch_chunk(entry(open_server), digest) == CONTENT
    assert time.monotonic() - start_s >= MIN_TRANSFER_S


async def test_clients_of_one_host_share_its_rate(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path
) -> None:
    server, own_settings = serve(), settings(tmp_path / "bound", rate_down=RATE)
    digest = await BulkClient(await join("free", settings=settings(tmp_path))).put_chunk(
        entry(server), CONTENT
    )
    clients = [BulkClient(await join(f"c{n}", settings=own_settings)) for n in range(3)]
    start_s = time.monotonic()
    contents = await asyncio.gather(
        *(client.fetch_chunk(entry(server), digest) for client in clients)
    )
    assert time.monotonic() - start_s >= 3 * len(CONTENT) / RATE - UNPAID_S
    assert contents == [CONTENT] * 3 and server.sent_bytes == 3 * len(CONTENT)


async def test_connection_of_a_cancelled_fetch_is_closed(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path
) -> None:
    server = serve(rate_up=500_000)
    unlimited_client = BulkClient(await join("free", settings=settings(tmp_path)))
    digest = await unlimited_client.put_chunk(entry(server), CONTENT)
    partial = PartialFile.for_file(tmp_path / "one", digest)
    fetch = asyncio.create_task(unlimited_client.fetch_to_file(entry(server), partial))
    await until(lambda: server.sent_bytes != 0)
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    partial.discard()
    await until(lambda: not server.connection_count)
    assert await unlimited_client.fetch_chunk(entry(server), digest) == CONTENT
