"""Files of any size cross hosts part by part, and go on when a connection breaks."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import ConfigError, Damaged, NotFound, PeerLost, StorageFull
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.registry import Entry
from meshrl.common.weights.bulk.doors import InterpreterDoor
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.bulk.transfer import BREAKS
from meshrl.common.weights.chunks.partial import PARKED, PARKED_S, Parked, Partial
from meshrl.common.weights.chunks.verified import NAME
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join
from tests.unit.common.weights.bulk.road import Road

CONTENT = os.urandom(3_000_000)
PART = 200_000
SETTINGS = MeshSettings("memory://", "", host="", secret="5e" * 32)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BulkServer]:
    chunks = ChunkStore(tmp_path / "chunks")
    made = BulkServer(chunks, SystemHost(), "tcp://127.0.0.1:*", door=InterpreterDoor())
    yield made
    made.close()


@pytest.fixture
async def client(join: Join) -> BulkClient:
    return BulkClient(await join("client", settings=SETTINGS), part_bytes=PART)


def entry(server: BulkServer, host: str = "another host") -> Entry:
    return Entry("store", "test", bulk=server.address, host=host)


def files(directory: Path) -> list[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.name for path in found if path.name != NAME)


async def fetch(client: BulkClient, there: Entry, digest: str, target: Path) -> None:
    with Partial.of_file(target, digest) as partial:
        await client.receive(there, partial)


@pytest.mark.parametrize("host", ["", "another host"])
@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART, 3_000_000])
async def test_a_file_that_was_put_is_fetched(
    server: BulkServer, client: BulkClient, host: str, size: int, tmp_path: Path
) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT[:size])
    for _ in range(2):
        assert await client.put_file(entry(server, host), source) == digest_of(CONTENT[:size])
    target = tmp_path / "new" / "target"
    await fetch(client, entry(server, host), digest_of(CONTENT[:size]), target)
    assert target.read_bytes() == CONTENT[:size]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert files(tmp_path / "new") == ["target"]
    assert files(tmp_path / "chunks") == [digest_of(CONTENT[:size])]


@pytest.mark.parametrize("host", ["", "another host"])
async def test_what_is_not_there_or_damaged_or_has_no_room_leaves_no_file(
    server: BulkServer, client: BulkClient, host: str, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "target"
    with pytest.raises(NotFound):
        await fetch(client, entry(server, host), "0" * 64, target)
    digest = await client.put(entry(server, host), CONTENT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(StorageFull):
            await fetch(client, entry(server, host), digest, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ChunkStore(tmp_path / "chunks").path(digest).write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(Damaged):
        await fetch(client, entry(server, host), digest, target)
    assert files(tmp_path / "new") == []
    (source := tmp_path / "source").write_bytes(CONTENT)
    assert await client.put_file(entry(server, host), source) == digest
    await fetch(client, entry(server, host), digest, target)
    assert target.read_bytes() == CONTENT


@contextmanager
def road(chunks: Path, most: int) -> Iterator[tuple[Road, Entry]]:
    """A server that says it is where the road begins: proofs are good for no other place."""
    made = BulkServer(
        ChunkStore(chunks),
        SystemHost(),
        "tcp://127.0.0.1:*",
        "127.0.0.2",
        door=InterpreterDoor(),
    )
    with Road(int(made.address.partition("#")[0].rpartition(":")[2]), most) as way:
        yield way, entry(made)
    made.close()


async def test_what_breaks_goes_on_where_it_was(client: BulkClient, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT)
    with road(tmp_path / "chunks", most=700_000) as (way, there):
        digest = await client.put_file(there, source)
        put, connections = way.carried, way.connections
        await fetch(client, there, digest, target := tmp_path / "new" / "target")
    assert target.read_bytes() == CONTENT and files(tmp_path / "new") == ["target"]
    assert files(tmp_path / "chunks") == [digest]
    least = len(CONTENT) // way.most + 1
    assert connections >= least and way.connections - connections >= least
    again = least * 2 * PART  # a part is sent again where it broke; what was not read is lost
    assert put < len(CONTENT) + again and way.carried - put < len(CONTENT) + again


async def test_a_way_that_stays_broken_is_a_lost_peer(client: BulkClient, tmp_path: Path) -> None:
    (source := tmp_path / "source").write_bytes(CONTENT)
    with road(tmp_path / "chunks", most=PART // 2) as (way, there):
        with pytest.raises(PeerLost):
            await client.put_file(there, source)
        assert way.connections == BREAKS
        digest = ChunkStore(tmp_path / "chunks").write(CONTENT)
        way.most = 0
        with pytest.raises(PeerLost):
            await fetch(client, there, digest, tmp_path / "new" / "target")
    assert files(tmp_path / "new") == []


async def test_who_does_not_wait_any_more_leaves_nothing(
    client: BulkClient, tmp_path: Path
) -> None:
    digest = ChunkStore(tmp_path / "chunks").write(CONTENT)
    target = tmp_path / "new" / "target"
    with road(tmp_path / "chunks", most=1 << 30) as (way, there):
        way.stands_at = 1_000_000
        fetching = asyncio.create_task(fetch(client, there, digest, target))
        while way.carried < way.stands_at:
            await asyncio.sleep(0.01)
        assert files(tmp_path / "new") != []
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert files(tmp_path / "new") == []
        async with asyncio.timeout(scaled(20)):
            while way.standing:  # until the client's thread has closed its socket
                await asyncio.sleep(0.01)
    assert files(tmp_path / "new") == []


def test_what_is_committed_twice_is_there_once(tmp_path: Path) -> None:
    """The client of a slow disk has gone and come back."""
    chunks = ChunkStore(tmp_path)
    with Partial.of_chunk(chunks, digest_of(CONTENT)) as partial:
        partial.write(CONTENT)
        partial.commit()
        partial.commit()
    assert chunks.read(digest_of(CONTENT)) == CONTENT
    assert files(tmp_path) == [digest_of(CONTENT)]


def test_what_nobody_goes_on_with_is_forgotten(tmp_path: Path) -> None:
    now = 0.0
    parked = Parked(lambda: now)
    chunks = ChunkStore(tmp_path)
    for position in range(1, PARKED + 3):
        partial = Partial.of_chunk(chunks, f"{position % 2:064x}")
        partial.write(bytes(position))
        parked.keep("", partial)
    assert len(files(tmp_path)) == PARKED
    longest = parked.take("", f"{0:064x}")
    assert longest is not None and longest.position == PARKED + 2
    now = PARKED_S + 1
    parked.age()
    assert len(files(tmp_path)) == 1 and parked.take("", f"{1:064x}") is None
    longest.discard()
    assert files(tmp_path) == []


def test_a_port_of_a_range_is_the_first_free_one(tmp_path: Path) -> None:
    def serving(ports: str) -> BulkServer:
        door = InterpreterDoor()
        return BulkServer(ChunkStore(tmp_path), SystemHost(), f"tcp://127.0.0.1:{ports}", door=door)

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
