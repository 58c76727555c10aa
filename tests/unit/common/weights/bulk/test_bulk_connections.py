"""Kept connections, and rates of bulk ports."""

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
STALL_S = 0.5  # of what is to stall
HANG_S = 20.0  # of what is to arrive
SECRET = "5e" * 32
CONTENT = os.urandom(600_000)
RATE = 2_000_000
SPARED_S = BURST_S + 2 * PIECE_DURATION_S  # the last piece is paid for by who comes next
LEAST_S = len(CONTENT) / RATE - SPARED_S  # that the content takes at this rate, however it is cut


class Server:
    def __init__(self, root: Path) -> None:
        self.chunks = ChunkStore(root)
        self.digests = [self.chunks.write(content) for content in CONTENTS]
        door, where = InProcessAuthenticator(), "tcp://127.0.0.1:*"
        self.port = BulkServer(self.chunks, SystemHost(), where, "127.0.0.2", authenticator=door)
        self.entry = RegistryEntry("store", "test", bulk=self.port.address, host="another host")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "chunks")
    yield made
    made.port.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultyProxy]:
    number = int(server.port.address.partition("#")[0].rpartition(":")[2])
    with FaultyProxy(number, 1 << 40) as made:
        yield made


@pytest.fixture
async def client(join: Join) -> AsyncIterator[BulkClient]:
    made = BulkClient(await join("client", settings=SETTINGS), part_bytes=70_000)
    yield made
    made._connection_pool.close_idle(0.0)


class Target:
    """A place for what arrives."""

    def __init__(self, root: Path, client: BulkClient, server: Server) -> None:
        self.chunks = ChunkStore(root / "target")
        self._client, self._server = client, server

    async def arrive(
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


async def test_chunks_one_after_the_other_come_over_one_connection(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    for digest in server.digests:
        await target.arrive(digest)
    with pytest.raises(NotFound):
        await target.arrive("0" * 64)
    await target.arrive(server.digests[0])
    assert proxy.connections == 1
    assert [target.chunks.read(digest) for digest in server.digests] == CONTENTS


async def test_one_that_was_closed_meanwhile_is_made_again(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    await target.arrive(server.digests[0])
    for end in list(proxy.open_connections):
        end.shutdown(2)
    await target.arrive(server.digests[1])
    assert proxy.connections == 2


async def test_what_breaks_is_left_as_far_as_it_came_and_goes_on_there(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    proxy.max_bytes = 120_000
    partial = PartialFile.for_chunk(target.chunks, server.digests[0], durable=False)
    with pytest.raises(PeerLost):
        await target.arrive(partial.digest, partial)
    assert 70_000 < partial.received_bytes < 120_000
    came, proxy.max_bytes, before = partial.received_bytes, 1 << 40, proxy.carried_bytes
    await target.arrive(partial.digest, partial)
    assert proxy.carried_bytes - before < len(CONTENTS[0]) - came + 2000
    assert target.chunks.read(partial.digest) == CONTENTS[0]


async def test_one_that_stalls_is_given_up(
    server: Server, proxy: FaultyProxy, target: Target
) -> None:
    proxy.stall_at_bytes = 120_000
    partial = PartialFile.for_chunk(target.chunks, server.digests[0], durable=False)
    with pytest.raises(DeadlineExceeded):
        await target.arrive(partial.digest, partial, STALL_S)
    assert 0 < partial.received_bytes < len(CONTENTS[0])
    proxy.stall_at_bytes = 1 << 40
    await target.arrive(partial.digest, partial)
    assert target.chunks.read(partial.digest) == CONTENTS[0]


@pytest.mark.parametrize("size", [0, 5, SIZE - 1, SIZE + 1, 50 * SIZE])
@pytest.mark.parametrize("near", [False, True])
async def test_what_has_another_size_elsewhere_is_not_taken(
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


async def test_no_more_are_kept_than_are_of_use(
    client: BulkClient, server: Server, proxy: FaultyProxy, tmp_path: Path
) -> None:
    digest = server.digests[0]
    for n in range(MAX_IDLE_CONNECTIONS + 4):  # as many processes, as far as the client knows
        entry = replace(server.entry, address=str(n))
        with PartialFile.for_file(tmp_path / "target", digest) as partial:
            await client.fetch_part(entry, partial, SIZE, stall_s=scaled(HANG_S))
    assert proxy.connections == MAX_IDLE_CONNECTIONS + 4
    await until(lambda: server.port.connection_count <= MAX_IDLE_CONNECTIONS)
    client._connection_pool.close_idle(0.0)
    await until(lambda: not server.port.connection_count)


async def test_a_late_thread_writes_nothing_into_what_another_source_goes_on_with(
    client: BulkClient, server: Server, proxy: FaultyProxy, target: Target
) -> None:
    """It stands in a read when nobody waits for it any more, and then has something to write."""
    digest = server.digests[0]
    partial = PartialFile.for_chunk(target.chunks, digest, durable=False)
    near = ChunkStore(target.chunks.directory.parent / "near")
    place = near.chunk_path(digest)
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    entry = replace(server.entry, host="", bulk=f"#{near.directory}")
    late = asyncio.create_task(client.fetch_part(entry, partial, SIZE, stall_s=scaled(HANG_S)))
    stands = await opened(place)
    late.cancel()
    await asyncio.wait([late])
    proxy.stall_at_bytes = 120_000
    with pytest.raises(DeadlineExceeded):
        await target.arrive(digest, partial, STALL_S)
    came, proxy.stall_at_bytes = partial.received_bytes, 1 << 40
    os.write(stands, b"x" * 5000)
    os.close(stands)
    await until(lambda: nobody_reads(place), 60)
    assert partial.received_bytes == came > 0
    await target.arrive(digest, partial)
    assert target.chunks.read(digest) == CONTENTS[0]


async def opened(pipe: Path) -> int:
    """The writing end of a pipe, once somebody reads there."""
    async with asyncio.timeout(scaled(60)):
        while True:
            with suppress(OSError):
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.01)


def nobody_reads(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def test_who_wrote_before_another_took_over_is_refused(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    partial = PartialFile.for_chunk(store, digest := compute_digest(b"one two"), durable=False)
    with partial, partial.take_writer() as first:
        first.write(b"one ")
        with partial.take_writer() as second:
            second.write(b"two")
            for late in (
                lambda: first.write(b"two"),
                first.verify_and_commit,
                lambda: first.received_bytes,
            ):
                with pytest.raises(Refused):
                    late()
            first.release()  # which is not to end the other one
            second.verify_and_commit()
        with pytest.raises(Refused):
            second.write(b"more")
    assert store.read(digest) == b"one two"


def test_what_arrived_changed_is_forgotten_by_who_finishes_it(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    partial = PartialFile.for_chunk(store, digest := compute_digest(b"content"), durable=False)
    with partial, partial.take_writer() as writer:
        writer.write(b"contend")
        with pytest.raises(CorruptData, match="arrived changed"):
            writer.verify_and_commit()
        assert writer.received_bytes == 0
        writer.write(b"content")
        writer.verify_and_commit()
    assert store.read(digest) == b"content"


def settings(root: Path, **more: Any) -> MeshSettings:
    return MeshSettings("memory://", str(root), host="", secret=SECRET, **more)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., BulkServer]]:
    made: list[BulkServer] = []

    def start(**more: int) -> BulkServer:
        own = settings(tmp_path / "server", **more)
        chunks, door = ChunkStore(tmp_path / "chunks"), InProcessAuthenticator()
        host, where = SystemHost(), "tcp://127.0.0.1:*"
        made.append(
            BulkServer(chunks, host, where, authenticator=door, rates=RateLimits.from_settings(own))
        )
        return made[-1]

    yield start
    for server in made:
        server.close()


def entry(server: BulkServer) -> RegistryEntry:
    return RegistryEntry("store", "test", bulk=server.address, host="another host")


def test_several_that_move_bytes_wait_as_long_as_one_that_moves_all(tmp_path: Path) -> None:
    rates = [RateLimiter(tmp_path / "up", 1_000_000) for _ in range(4)]
    began = time.monotonic()
    waits = [rates[n % 4].charge(10_000) for n in range(100)]
    lasted_s = time.monotonic() - began
    assert 1.0 - BURST_S - lasted_s <= waits[-1] <= 1.0
    assert waits == sorted(waits) or lasted_s > 0.01  # each waits behind the one before
    assert rates[0].piece_bytes == MIN_PIECE_BYTES


def test_threads_of_one_process_wait_for_each_other_too(tmp_path: Path) -> None:
    rate = RateLimiter(tmp_path / "up", 10_000_000)

    def move() -> None:
        for _ in range(500):
            rate.charge(10_000)

    began = time.monotonic()
    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rate.charge(0) >= 2.0 - BURST_S - (time.monotonic() - began)


def test_what_an_earlier_boot_has_written_keeps_nobody_waiting(tmp_path: Path) -> None:
    rate = RateLimiter(tmp_path / "up", 1000)
    rate._free_at[:] = struct.pack("<d", time.monotonic() + 2 * MAX_BACKLOG_S)
    assert rate.charge(10) < 1.0


@pytest.mark.parametrize("way", ["up", "down"])
async def test_getting_and_putting_take_as_long_as_the_rates_of_both_ends_say(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path, way: str
) -> None:
    server = serve(rate_up=RATE if way == "up" else 0, rate_down=RATE if way == "down" else 0)
    free = BulkClient(await join("free", settings=settings(tmp_path / "free")))
    began = time.monotonic()
    digest = await free.put_chunk(entry(server), CONTENT)
    assert way == "up" or time.monotonic() - began >= LEAST_S
    began = time.monotonic()
    assert await free.fetch_chunk(entry(server), digest) == CONTENT
    assert way == "down" or time.monotonic() - began >= LEAST_S
    open_server = serve()
    own = settings(tmp_path / "bound", **{f"rate_{way}": RATE})
    bound = BulkClient(await join("bound", settings=own))
    began = time.monotonic()
    if way == "up":
        await bound.put_chunk(entry(open_server), CONTENT[1:])
    else:
        assert await bound.fetch_chunk(entry(open_server), digest) == CONTENT
    assert time.monotonic() - began >= LEAST_S


async def test_clients_of_one_host_share_its_rate(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path
) -> None:
    server, own = serve(), settings(tmp_path / "bound", rate_down=RATE)
    digest = await BulkClient(await join("free", settings=settings(tmp_path))).put_chunk(
        entry(server), CONTENT
    )
    clients = [BulkClient(await join(f"c{n}", settings=own)) for n in range(3)]
    began = time.monotonic()
    found = await asyncio.gather(*(client.fetch_chunk(entry(server), digest) for client in clients))
    assert time.monotonic() - began >= 3 * len(CONTENT) / RATE - SPARED_S
    assert found == [CONTENT] * 3 and server.sent_bytes == 3 * len(CONTENT)


async def test_who_has_paused_is_served_to_the_end_and_may_go(
    serve: Callable[..., BulkServer], join: Join, tmp_path: Path
) -> None:
    server = serve(rate_up=500_000)
    free = BulkClient(await join("free", settings=settings(tmp_path)))
    digest = await free.put_chunk(entry(server), CONTENT)
    partial = PartialFile.for_file(tmp_path / "one", digest)
    leaving = asyncio.create_task(free.fetch_to_file(entry(server), partial))
    await until(lambda: server.sent_bytes != 0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    partial.discard()
    await until(lambda: not server.connection_count)
    assert await free.fetch_chunk(entry(server), digest) == CONTENT
