"""Hosts fetch versions from the store and from each other, over sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import CorruptData, NotAllowed, NotFound, Refused, StorageFull
from meshrl.common.state import registry
from meshrl.common.weights.bulk.channel import IoSteps
from meshrl.common.weights.bulk.served_connection import ServedConnection
from meshrl.common.weights.bulk.session import OK, RESPONSE_HEADER
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.pull.chunk_pull import MissingChunk, _ChunkPull, pull_chunks
from meshrl.common.weights.store import chunk_cache
from tests.load import scaled
from tests.unit.common.weights.bulk.faulty_proxy import FaultyProxy
from tests.unit.weights.relay.hosts import CHUNK, Fetcher, Hosts

LARGE = 3_000_000


def port_of(address: str) -> int:
    return int(address.partition("#")[0].rpartition(":")[2])


@asynccontextmanager
async def far(
    hosts: Hosts, wanted: list[MissingChunk], most: int = 1 << 40
) -> AsyncIterator[FaultyProxy]:
    """Return a host with all chunks and one endpoint, which the store has named before."""
    agent = hosts.process("node/far", "far", advertise="127.0.0.2")
    server = chunk_cache.serve_cache(agent)
    assert server is not None
    hosts.servers["far"] = server
    with FaultyProxy(port_of(server.address), most) as proxy:
        await agent.join(None, bulk_address=server.address)
        await (await hosts.fetcher("far")).pull(wanted)
        yield proxy


async def near(hosts: Hosts) -> Fetcher:
    await hosts.host("near")
    return await hosts.fetcher("near")


async def test_a_host_fetches_what_it_lacks_and_nothing_twice(hosts: Hosts) -> None:
    fetcher, wanted = await near(hosts), hosts.version(24)
    there = fetcher.chunks.write(hosts.store.read(wanted[3].digest))
    pulled = await fetcher.pull(wanted)
    assert hosts.right("near", wanted) and there == wanted[3].digest
    assert pulled.fetched_bytes == pulled.store_bytes == 23 * CHUNK
    assert hosts.copies_sent <= (23 + fetcher.told("failed")) * CHUNK
    assert hosts.servers["head"].connection_count <= 4 + fetcher.told("failed")  # they are retained
    sent, again = hosts.copies_sent, await fetcher.pull(wanted)
    assert again.fetched_bytes == 0 and hosts.copies_sent == sent
    fetcher.bulk._connection_pool.close_idle(0.0)


async def test_the_store_sends_a_version_at_most_twice_to_relaying_hosts(hosts: Hosts) -> None:
    for n in range(5):
        await hosts.host(f"h{n}")
    fetchers = [await hosts.fetcher(f"h{n}") for n in range(5)]
    wanted = hosts.version(16)
    pulled = await asyncio.gather(*(fetcher.pull(wanted) for fetcher in fetchers))
    assert all(hosts.right(f"h{n}", wanted) for n in range(5))
    assert sum(one.fetched_bytes for one in pulled) == 5 * 16 * CHUNK
    failed = sum(fetcher.told("failed") for fetcher in fetchers)
    assert sum(one.store_bytes for one in pulled) <= hosts.copies_sent
    assert hosts.copies_sent <= (2 * 16 + failed) * CHUNK
    assert sum(one.fetched_bytes - one.store_bytes for one in pulled) >= (3 * 16 - failed) * CHUNK


async def test_a_late_host_takes_nothing_from_the_store(hosts: Hosts) -> None:
    wanted = hosts.version(16)
    async with far(hosts, wanted):
        sent, late = hosts.copies_sent, await near(hosts)
        pulled = await late.pull(wanted)
    failed = late.told("failed")
    assert hosts.right("near", wanted) and hosts.copies_sent - sent <= failed * CHUNK
    assert (
        pulled.fetched_bytes == 16 * CHUNK
        and pulled.fetched_bytes - pulled.store_bytes >= (16 - failed) * CHUNK
    )


async def test_processes_of_a_host_share_the_work(hosts: Hosts) -> None:
    await hosts.host("near")
    fetchers = [await hosts.fetcher("near", f"engine/g{n}") for n in range(3)]
    wanted = hosts.version(32)
    pulled = await asyncio.gather(*(fetcher.pull(wanted) for fetcher in fetchers))
    assert hosts.right("near", wanted)
    # A process that stands still for seconds may be taken for gone: what it fetches, others do.
    assert 32 * CHUNK <= sum(one.fetched_bytes for one in pulled) <= 36 * CHUNK
    assert hosts.copies_sent <= 40 * CHUNK


@pytest.mark.parametrize("trouble", ["breaks", "stalls"])
async def test_another_source_goes_on_at_the_byte(hosts: Hosts, trouble: str) -> None:
    wanted = hosts.version(1, LARGE)
    half = LARGE // 2
    async with far(hosts, wanted, half if trouble == "breaks" else 1 << 40) as proxy:
        if trouble == "stalls":
            proxy.stall_at_bytes = half
        sent, fetcher = hosts.copies_sent, await near(hosts)
        pulled = await fetcher.pull(wanted)
        assert proxy.carried_bytes >= half
    assert hosts.right("near", wanted) and pulled.fetched_bytes == LARGE
    # What the way had carried by then came once, but for headers and a piece of 64 KiB.
    assert abs(hosts.copies_sent - sent - (LARGE - half)) < 70_000
    assert fetcher.told("failed") >= 1


@pytest.mark.parametrize("where", ["way", "disk"])
async def test_a_bit_that_a_peer_changes_is_found_and_healed(hosts: Hosts, where: str) -> None:
    wanted = hosts.version(3)
    async with far(hosts, wanted) as proxy:
        if where == "way":
            proxy.corrupt_at = CHUNK // 2
        else:
            path = hosts.cache("far").chunk_path(wanted[1].digest)
            content = bytearray(path.read_bytes())
            content[7] ^= 1
            path.write_bytes(content)
        fetcher = await near(hosts)
        await fetcher.pull(wanted)
    assert hosts.right("near", wanted)
    assert fetcher.told("damaged") >= 1


@pytest.mark.parametrize("size", [0, CHUNK // 2, 40 * CHUNK])
async def test_a_peer_with_another_size_of_a_chunk_is_left(hosts: Hosts, size: int) -> None:
    wanted = hosts.version(3)
    async with far(hosts, wanted):
        hosts.cache("far").chunk_path(wanted[1].digest).write_bytes(b"x" * size)
        sent, fetcher = hosts.servers["far"].sent_bytes, await near(hosts)
        await fetcher.pull(wanted)
        assert hosts.servers["far"].sent_bytes - sent < 4 * CHUNK
    assert hosts.right("near", wanted) and fetcher.told("damaged") >= 1


@pytest.mark.parametrize("answer", ["nothing", "an error"])
async def test_a_peer_that_does_not_send_what_it_has_is_replaced(
    hosts: Hosts, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check replacement of a peer without data. One reports that it sends no byte of a chunk that
    it has; one reports an error of its own.
    """
    right = ServedConnection._handle_get

    def get(self: ServedConnection, digest: str, offset: int, most: int) -> IoSteps[None]:
        if self._chunks.directory != hosts.cache("far").directory:
            yield from right(self, digest, offset, most)
        elif answer == "nothing":
            yield from self._channel.send(RESPONSE_HEADER.pack(OK, CHUNK, 0))
        else:
            raise Refused("it has other things to do")

    monkeypatch.setattr(ServedConnection, "_handle_get", get)
    wanted = hosts.version(3)
    async with far(hosts, wanted):
        fetcher = await near(hosts)
        async with asyncio.timeout(scaled(30)):
            pulled = await fetcher.pull(wanted)
    assert hosts.right("near", wanted) and pulled.store_bytes == 3 * CHUNK


async def test_a_pull_goes_on_after_any_number_of_failures(hosts: Hosts) -> None:
    fetcher, wanted = await near(hosts), hosts.version(1)
    pulling = _ChunkPull(fetcher.mesh, fetcher.bulk, fetcher.chunks, "")
    pulling._consecutive_failures = 5000
    assert (await pulling.run({one.digest: one for one in wanted}, (), ())).fetched_bytes == CHUNK


async def test_what_a_peer_has_dropped_comes_from_the_store(hosts: Hosts) -> None:
    wanted = hosts.version(4)
    async with far(hosts, wanted):
        sent = hosts.copies_sent
        hosts.cache("far").chunk_path(wanted[2].digest).unlink()
        pulled = await (fetcher := await near(hosts)).pull(wanted)
    assert hosts.right("near", wanted) and fetcher.told("gone") == 1
    assert CHUNK <= pulled.store_bytes <= hosts.copies_sent - sent
    assert pulled.store_bytes <= (1 + fetcher.told("failed")) * CHUNK


async def test_a_host_whose_agent_ends_is_replaced(hosts: Hosts) -> None:
    wanted = hosts.version(8)
    await hosts.host("gone")
    await (await hosts.fetcher("gone")).pull(wanted)
    hosts.servers["gone"].close()
    while hosts.servers["gone"]._selector.get_map() is not None:
        await asyncio.sleep(0.01)
    pulled = await (await near(hosts)).pull(wanted)
    assert hosts.right("near", wanted) and pulled.fetched_bytes == 8 * CHUNK


@pytest.mark.parametrize("harm", ["gone", "changed"])
async def test_what_the_store_lacks_is_told_once_all_else_is_there(hosts: Hosts, harm: str) -> None:
    fetcher, wanted = await near(hosts), hosts.version(6)
    path = hosts.store.chunk_path(wanted[2].digest)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(os.urandom(CHUNK))
    with pytest.raises(NotFound if harm == "gone" else CorruptData):
        await fetcher.pull(wanted)
    assert hosts.right("near", wanted[:2] + wanted[3:])
    assert not hosts.store.has(wanted[2].digest)  # a corrupt one was quarantined
    assert not fetcher.chunks.has(wanted[2].digest)


async def test_a_store_that_is_started_anew_is_told_again(hosts: Hosts) -> None:
    await hosts.host("near")
    fetcher = await hosts.fetcher("near", rate_down=2_000_000)
    wanted = hosts.version(12)
    pulling = asyncio.create_task(fetcher.pull(wanted))
    while not list(fetcher.chunks.directory.glob("??/*")):
        await asyncio.sleep(0.01)
    store = next(mesh for mesh in hosts.meshes if mesh.name == STORE_NAME)
    await store.leave()
    hosts.servers["head"].close()
    hosts.meshes.remove(store)
    await hosts.enter()
    async with asyncio.timeout(scaled(30)):
        pulled = await pulling
    assert hosts.right("near", wanted) and pulled.fetched_bytes == 12 * CHUNK


async def test_one_that_is_cancelled_leaves_whole_chunks_alone(hosts: Hosts) -> None:
    await hosts.host("near")
    fetcher = await hosts.fetcher("near", rate_down=1_000_000)
    wanted = hosts.version(12)
    pulling = asyncio.create_task(fetcher.pull(wanted))
    while not [p for p in fetcher.chunks.directory.glob("??/*") if not p.name.startswith(".")]:
        await asyncio.sleep(0.01)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    left = list(fetcher.chunks.directory.glob("??/*"))
    assert 0 < len(left) < 12
    assert all(compute_digest(path.read_bytes()) == path.name for path in left)
    second = await hosts.fetcher("near", "engine/second")
    await second.pull(wanted)
    assert hosts.right("near", wanted)


async def test_a_host_gives_chunks_and_takes_none(hosts: Hosts) -> None:
    """Check that a host serves chunks and rejects uploads, whose size nothing would bound."""
    wanted = hosts.version(1)
    async with far(hosts, wanted):
        fetcher = await near(hosts)
        entry = await registry.lookup(hosts.state, "node/far")
        assert entry is not None
        with pytest.raises(NotAllowed, match="takes none"):
            await fetcher.bulk.put_chunk(entry, b"something")
        path = hosts.root / "file"
        path.write_bytes(b"something")
        with pytest.raises(NotAllowed, match="takes none"):
            await fetcher.bulk.put_file(entry, path)
        assert (
            compute_digest(await fetcher.bulk.fetch_chunk(entry, wanted[0].digest))
            == wanted[0].digest
        )


async def test_what_has_no_room_is_said_before_anything_is_fetched(hosts: Hosts) -> None:
    await hosts.host("near")
    fetcher = await hosts.fetcher("near", chunks_bytes=3 * CHUNK)
    with pytest.raises(StorageFull, match="no room for 400000 bytes"):
        await fetcher.pull(hosts.version(4))
    assert hosts.copies_sent == 0
    first, second = hosts.version(2), hosts.version(2)
    await fetcher.pull(first)
    await fetcher.pull(second)  # what was not used for longest makes room
    assert hosts.right("near", second)


async def test_another_directory_takes_chunks_too(hosts: Hosts) -> None:
    fetcher, wanted = await hosts.fetcher("alone"), hosts.version(5)
    elsewhere = ChunkStore(hosts.root / "elsewhere")
    pulled = await pull_chunks(fetcher.mesh, fetcher.bulk, wanted, elsewhere)
    assert pulled.fetched_bytes == 5 * CHUNK
    assert all(elsewhere.read(one.digest) for one in wanted)


async def test_a_source_far_slower_than_others_is_left(hosts: Hosts) -> None:
    agent = hosts.process("node/slow", "slow", rate_up=40_000)
    server = chunk_cache.serve_cache(agent)
    assert server is not None
    hosts.servers["slow"] = server
    await agent.join(None, bulk_address=server.address)
    wanted = hosts.version(6, LARGE // 10)
    await (await hosts.fetcher("slow")).pull(wanted[:1])  # from there alone it would take 8 s
    fetcher = await near(hosts)
    async with asyncio.timeout(scaled(60)):
        pulled = await fetcher.pull(wanted)
    assert hosts.right("near", wanted)
    assert pulled.fetched_bytes == 6 * (LARGE // 10) and server.sent_bytes < LARGE // 10
