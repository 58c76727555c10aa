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


def parse_port(address: str) -> int:
    return int(address.partition("#")[0].rpartition(":")[2])


@asynccontextmanager
async def start_far_host(
    hosts: Hosts, chunks: list[MissingChunk], max_bytes: int = 1 << 40
) -> AsyncIterator[FaultyProxy]:
    """Start a host that has all chunks and serves them through a proxy; yield the proxy."""
    agent = hosts.process("node/far", "far", advertise="127.0.0.2")
    server = chunk_cache.serve_cache(agent)
    assert server is not None
    hosts.servers["far"] = server
    with FaultyProxy(parse_port(server.address), max_bytes) as proxy:
        await agent.join(None, bulk_address=server.address)
        await (await hosts.start_fetcher("far")).pull(chunks)
        yield proxy


async def start_near_fetcher(hosts: Hosts) -> Fetcher:
    await hosts.start_agent("near")
    return await hosts.start_fetcher("near")


async def test_host_fetches_only_missing_chunks_once(hosts: Hosts) -> None:
    fetcher, chunks = await start_near_fetcher(hosts), hosts.store_chunks(24)
    present = fetcher.chunks.write(hosts.store.read(chunks[3].digest))
    result = await fetcher.pull(chunks)
    assert hosts.has_valid_chunks("near", chunks) and present == chunks[3].digest
    assert result.fetched_bytes == result.store_bytes == 23 * CHUNK
    assert hosts.store_sent_bytes <= (23 + fetcher.count("failed")) * CHUNK
    # connections are reused
    assert hosts.servers["head"].connection_count <= 4 + fetcher.count("failed")
    sent, second = hosts.store_sent_bytes, await fetcher.pull(chunks)
    assert second.fetched_bytes == 0 and hosts.store_sent_bytes == sent
    fetcher.bulk._connection_pool.close_idle(0.0)


async def test_store_sends_a_version_at_most_twice_to_relaying_hosts(hosts: Hosts) -> None:
    for n in range(5):
        await hosts.start_agent(f"h{n}")
    fetchers = [await hosts.start_fetcher(f"h{n}") for n in range(5)]
    chunks = hosts.store_chunks(16)
    result = await asyncio.gather(*(fetcher.pull(chunks) for fetcher in fetchers))
    assert all(hosts.has_valid_chunks(f"h{n}", chunks) for n in range(5))
    assert sum(one.fetched_bytes for one in result) == 5 * 16 * CHUNK
    failed = sum(fetcher.count("failed") for fetcher in fetchers)
    assert sum(one.store_bytes for one in result) <= hosts.store_sent_bytes
    assert hosts.store_sent_bytes <= (2 * 16 + failed) * CHUNK
    assert sum(one.fetched_bytes - one.store_bytes for one in result) >= (3 * 16 - failed) * CHUNK


async def test_late_host_fetches_nothing_from_the_store(hosts: Hosts) -> None:
    chunks = hosts.store_chunks(16)
    async with start_far_host(hosts, chunks):
        sent, late = hosts.store_sent_bytes, await start_near_fetcher(hosts)
        result = await late.pull(chunks)
    failed = late.count("failed")
    assert (
        hosts.has_valid_chunks("near", chunks) and hosts.store_sent_bytes - sent <= failed * CHUNK
    )
    assert (
        result.fetched_bytes == 16 * CHUNK
        and result.fetched_bytes - result.store_bytes >= (16 - failed) * CHUNK
    )


async def test_processes_of_one_host_share_the_download(hosts: Hosts) -> None:
    await hosts.start_agent("near")
    fetchers = [await hosts.start_fetcher("near", f"engine/g{n}") for n in range(3)]
    chunks = hosts.store_chunks(32)
    result = await asyncio.gather(*(fetcher.pull(chunks) for fetcher in fetchers))
    assert hosts.has_valid_chunks("near", chunks)
    # The other processes fetch the chunks of a process that stalls for seconds.
    assert 32 * CHUNK <= sum(one.fetched_bytes for one in result) <= 36 * CHUNK
    assert hosts.store_sent_bytes <= 40 * CHUNK


@pytest.mark.parametrize("failure", ["breaks", "stalls"])
async def test_another_source_resumes_at_the_byte(hosts: Hosts, failure: str) -> None:
    chunks = hosts.store_chunks(1, LARGE)
    half = LARGE // 2
    async with start_far_host(hosts, chunks, half if failure == "breaks" else 1 << 40) as proxy:
        if failure == "stalls":
            proxy.stall_at_bytes = half
        sent, fetcher = hosts.store_sent_bytes, await start_near_fetcher(hosts)
        result = await fetcher.pull(chunks)
        assert proxy.carried_bytes >= half
    assert hosts.has_valid_chunks("near", chunks) and result.fetched_bytes == LARGE
    # Only headers and one piece of 64 KiB are transferred twice.
    assert abs(hosts.store_sent_bytes - sent - (LARGE - half)) < 70_000
    assert fetcher.count("failed") >= 1


@pytest.mark.parametrize("where", ["network", "disk"])
async def test_bit_flipped_by_a_peer_is_detected_and_repaired(hosts: Hosts, where: str) -> None:
    chunks = hosts.store_chunks(3)
    async with start_far_host(hosts, chunks) as proxy:
        if where == "network":
            proxy.corrupt_at = CHUNK // 2
        else:
            path = hosts.cache("far").chunk_path(chunks[1].digest)
            content = bytearray(path.read_bytes())
            content[7] ^= 1
            path.write_bytes(content)
        fetcher = await start_near_fetcher(hosts)
        await fetcher.pull(chunks)
    assert hosts.has_valid_chunks("near", chunks)
    assert fetcher.count("damaged") >= 1


@pytest.mark.parametrize("size", [0, CHUNK // 2, 40 * CHUNK])
async def test_peer_with_a_chunk_of_another_size_is_abandoned(hosts: Hosts, size: int) -> None:
    chunks = hosts.store_chunks(3)
    async with start_far_host(hosts, chunks):
        hosts.cache("far").chunk_path(chunks[1].digest).write_bytes(b"x" * size)
        sent, fetcher = hosts.servers["far"].sent_bytes, await start_near_fetcher(hosts)
        await fetcher.pull(chunks)
        assert hosts.servers["far"].sent_bytes - sent < 4 * CHUNK
    assert hosts.has_valid_chunks("near", chunks) and fetcher.count("damaged") >= 1


@pytest.mark.parametrize("answer", ["nothing", "an error"])
async def test_peer_that_sends_no_data_is_replaced(
    hosts: Hosts, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the replacement of a peer that sends no byte of its chunk, or an error."""
    original = ServedConnection._handle_get

    def get(self: ServedConnection, digest: str, offset: int, max_bytes: int) -> IoSteps[None]:
        if self._chunks.directory != hosts.cache("far").directory:
            yield from original(self, digest, offset, max_bytes)
        elif answer == "nothing":
            yield from self._channel.send(RESPONSE_HEADER.pack(OK, CHUNK, 0))
        else:
            raise Refused("it has other things to do")

    monkeypatch.setattr(ServedConnection, "_handle_get", get)
    chunks = hosts.store_chunks(3)
    async with start_far_host(hosts, chunks):
        fetcher = await start_near_fetcher(hosts)
        async with asyncio.timeout(scaled(30)):
            result = await fetcher.pull(chunks)
    assert hosts.has_valid_chunks("near", chunks) and result.store_bytes == 3 * CHUNK


async def test_pull_continues_after_any_number_of_failures(hosts: Hosts) -> None:
    fetcher, chunks = await start_near_fetcher(hosts), hosts.store_chunks(1)
    pull = _ChunkPull(fetcher.mesh, fetcher.bulk, fetcher.chunks, "")
    pull._consecutive_failures = 5000
    assert (await pull.run({one.digest: one for one in chunks}, (), ())).fetched_bytes == CHUNK


async def test_chunk_deleted_by_a_peer_is_fetched_from_the_store(hosts: Hosts) -> None:
    chunks = hosts.store_chunks(4)
    async with start_far_host(hosts, chunks):
        sent = hosts.store_sent_bytes
        hosts.cache("far").chunk_path(chunks[2].digest).unlink()
        result = await (fetcher := await start_near_fetcher(hosts)).pull(chunks)
    assert hosts.has_valid_chunks("near", chunks) and fetcher.count("gone") == 1
    assert CHUNK <= result.store_bytes <= hosts.store_sent_bytes - sent
    assert result.store_bytes <= (1 + fetcher.count("failed")) * CHUNK


async def test_host_whose_agent_exits_is_replaced(hosts: Hosts) -> None:
    chunks = hosts.store_chunks(8)
    await hosts.start_agent("gone")
    await (await hosts.start_fetcher("gone")).pull(chunks)
    hosts.servers["gone"].close()
    while hosts.servers["gone"]._selector.get_map() is not None:
        await asyncio.sleep(0.01)
    result = await (await start_near_fetcher(hosts)).pull(chunks)
    assert hosts.has_valid_chunks("near", chunks) and result.fetched_bytes == 8 * CHUNK


@pytest.mark.parametrize("harm", ["gone", "changed"])
async def test_chunk_missing_from_the_store_fails_after_all_others_arrived(
    hosts: Hosts, harm: str
) -> None:
    fetcher, chunks = await start_near_fetcher(hosts), hosts.store_chunks(6)
    path = hosts.store.chunk_path(chunks[2].digest)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(os.urandom(CHUNK))
    with pytest.raises(NotFound if harm == "gone" else CorruptData):
        await fetcher.pull(chunks)
    assert hosts.has_valid_chunks("near", chunks[:2] + chunks[3:])
    assert not hosts.store.has(chunks[2].digest)  # a corrupt one was quarantined
    assert not fetcher.chunks.has(chunks[2].digest)


async def test_pull_continues_after_a_restart_of_the_store(hosts: Hosts) -> None:
    await hosts.start_agent("near")
    fetcher = await hosts.start_fetcher("near", rate_down=2_000_000)
    chunks = hosts.store_chunks(12)
    pull = asyncio.create_task(fetcher.pull(chunks))
    while not list(fetcher.chunks.directory.glob("??/*")):
        await asyncio.sleep(0.01)
    store = next(mesh for mesh in hosts.meshes if mesh.name == STORE_NAME)
    await store.leave()
    hosts.servers["head"].close()
    hosts.meshes.remove(store)
    await hosts.start_store()
    async with asyncio.timeout(scaled(30)):
        result = await pull
    assert hosts.has_valid_chunks("near", chunks) and result.fetched_bytes == 12 * CHUNK


async def test_cancelled_pull_leaves_only_complete_chunks(hosts: Hosts) -> None:
    await hosts.start_agent("near")
    fetcher = await hosts.start_fetcher("near", rate_down=1_000_000)
    chunks = hosts.store_chunks(12)
    pull = asyncio.create_task(fetcher.pull(chunks))
    while not [p for p in fetcher.chunks.directory.glob("??/*") if not p.name.startswith(".")]:
        await asyncio.sleep(0.05)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    paths = list(fetcher.chunks.directory.glob("??/*"))
    assert 0 < len(paths) < 12
    assert all(compute_digest(path.read_bytes()) == path.name for path in paths)
    second = await hosts.start_fetcher("near", "engine/second")
    await second.pull(chunks)
    assert hosts.has_valid_chunks("near", chunks)


async def test_host_serves_chunks_and_rejects_uploads(hosts: Hosts) -> None:
    chunks = hosts.store_chunks(1)
    async with start_far_host(hosts, chunks):
        fetcher = await start_near_fetcher(hosts)
        entry = await registry.lookup(hosts.state, "node/far")
        assert entry is not None
        with pytest.raises(NotAllowed, match="accepts no chunks"):
            await fetcher.bulk.put_chunk(entry, b"something")
        path = hosts.root / "file"
        path.write_bytes(b"something")
        with pytest.raises(NotAllowed, match="accepts no chunks"):
            await fetcher.bulk.put_file(entry, path)
        assert (
            compute_digest(await fetcher.bulk.fetch_chunk(entry, chunks[0].digest))
            == chunks[0].digest
        )


async def test_version_beyond_the_cache_size_fails_before_the_fetch(hosts: Hosts) -> None:
    await hosts.start_agent("near")
    fetcher = await hosts.start_fetcher("near", chunks_bytes=3 * CHUNK)
    with pytest.raises(StorageFull, match="no space for 400000 bytes"):
        await fetcher.pull(hosts.store_chunks(4))
    assert hosts.store_sent_bytes == 0
    first, second = hosts.store_chunks(2), hosts.store_chunks(2)
    await fetcher.pull(first)
    await fetcher.pull(second)  # evicts the least recently used chunks
    assert hosts.has_valid_chunks("near", second)


async def test_pull_writes_to_another_directory(hosts: Hosts) -> None:
    fetcher, chunks = await hosts.start_fetcher("alone"), hosts.store_chunks(5)
    elsewhere = ChunkStore(hosts.root / "elsewhere")
    result = await pull_chunks(fetcher.mesh, fetcher.bulk, chunks, elsewhere)
    assert result.fetched_bytes == 5 * CHUNK
    assert all(elsewhere.read(one.digest) for one in chunks)


async def test_much_slower_source_is_abandoned(hosts: Hosts) -> None:
    agent = hosts.process("node/slow", "slow", rate_up=40_000)
    server = chunk_cache.serve_cache(agent)
    assert server is not None
    hosts.servers["slow"] = server
    await agent.join(None, bulk_address=server.address)
    chunks = hosts.store_chunks(6, LARGE // 10)
    # a fetch from there alone would take 8 s
    await (await hosts.start_fetcher("slow")).pull(chunks[:1])
    fetcher = await start_near_fetcher(hosts)
    async with asyncio.timeout(scaled(60)):
        result = await fetcher.pull(chunks)
    assert hosts.has_valid_chunks("near", chunks)
    assert result.fetched_bytes == 6 * (LARGE // 10) and server.sent_bytes < LARGE // 10
