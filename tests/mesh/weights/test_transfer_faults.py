"""Weight transfers under faults: corruption, slow or killed processes, lost hosts, full disks."""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from loadtests.weights import models
from loadtests.weights.contents import identity_of
from loadtests.weights.scene import Member, OrderFailed
from meshrl.common.state import jobs
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from tests.load import scaled
from tests.mesh.weights.transfer_bench import (
    ENDLESS,
    MODEL,
    POLL_S,
    WHOLE,
    WITHIN_S,
    TransferBench,
    until,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.group("weather")]


INTO_A_CHUNK = 300_000  # bytes


def flip(files: set[Path]) -> Path:
    """Flip a bit in the middle of the largest of these files, and return the file."""
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def list_chunks(directory: Path) -> set[Path]:
    """Return the files of a chunk store."""
    return set(directory.glob("??/*"))


@pytest.mark.deep
async def test_flipped_bit_on_the_wire_is_fetched_again(bench: TransferBench) -> None:
    await bench.begin()
    await bench.publish()
    bench.proxy.corrupt_at = INTO_A_CHUNK  # new connections of a new host are corrupted too
    engine = await bench.new_engine(host=3)
    await until(lambda: bench.proxy.corrupted_count, "a bit is flipped")
    assert await bench.read_served_version(engine) in (-1, 1)
    bench.proxy.corrupt_at = -1
    await bench.wait_for_version(engine)


@pytest.mark.rotating(5)
async def test_flipped_bit_in_a_hosts_chunk_cache_is_fetched_again(bench: TransferBench) -> None:
    await bench.begin()
    await bench.engine.kill()
    path = flip(list_chunks(bench.scene.root(1) / "chunks"))
    spoiled = path.read_bytes()
    await bench.wait_for_version(await bench.new_engine())
    assert path.read_bytes() != spoiled


@pytest.mark.rotating(5)
async def test_flipped_bit_in_the_store_is_restaged(bench: TransferBench) -> None:
    await bench.begin()
    store = bench.scene.root(0) / "store"
    before = list_chunks(store)
    digest = await bench.stage()
    path = flip(list_chunks(store) - before)
    spoiled = path.read_bytes()
    await bench.commit(digest)
    await bench.wait_for_version(bench.engine)  # once the trainer has written the chunk again
    assert path.read_bytes() != spoiled


SIZE = 8 << 20  # chunks of 1 MiB, whose deltas are in one blob
SHARE = 0.05  # of the elements that change from a version to the next
MOST = SHARE * 2.5 * SIZE  # bytes of a delta with its messages


class Versions:
    """Versions with small differences, on their way to one receiver."""

    def __init__(self, bench: TransferBench) -> None:
        self.bench, self.count = bench, 0

    async def begin(self) -> None:
        """Publish the first version to the receiver."""
        bench = self.bench
        bench.store, bench.proxy = await bench.start_behind_proxy(
            "weights", 0, "meshrl.services.weights"
        )
        self.publisher = await bench.scene.publisher()
        await self.publisher.ask("make", size=SIZE)
        self.receiver = await self.new_receiver(0)
        assert (
            await self.wait_for_bytes(self.receiver, await self.stage_next(self.publisher)) > SIZE
        )

    async def new_receiver(self, number: int) -> Member:
        receiver = await self.bench.scene.receiver(number, host=1)
        await receiver.ask("ready", size=SIZE)
        return receiver

    async def stage_next(self, publisher: Member) -> str:
        """Stage the next version, for which deltas are being created."""
        await publisher.ask("change", share=SHARE, seed=self.count)
        staged_version: dict[str, Any] = await publisher.ask(
            "stage", version=self.count, deltas=True
        )
        self.identity = await publisher.ask("identity")
        self.count += 1
        return str(staged_version["digest"])

    async def wait_for_bytes(self, receiver: Member, digest: str) -> int:
        """Return the bytes that arrived for a version after the receiver is complete."""
        before = self.bench.proxy.carried_bytes
        await receiver.ask("receive", digest=digest)
        assert await receiver.ask("identity") == self.identity
        return self.bench.proxy.carried_bytes - before

    async def receive_half(self, digest: str) -> Any:
        """Return the order to receive a version, once half of its delta has arrived."""
        proxy = self.bench.proxy
        proxy.stall_at_bytes = proxy.carried_bytes + int(SHARE * SIZE)
        order = self.bench.scene.send_order(self.receiver, "receive", digest=digest)
        await self.bench.wait_until_stalled()
        return order


@pytest.fixture
async def versions(bench: TransferBench) -> Versions:
    found = Versions(bench)
    await found.begin()
    return found


@pytest.mark.rotating(5)
async def test_receiver_survives_a_killed_delta_sender(versions: Versions) -> None:
    digest = await versions.stage_next(versions.publisher)
    await versions.publisher.kill()
    await versions.wait_for_bytes(versions.receiver, digest)
    successor = await versions.bench.scene.publisher()
    await successor.ask("make", size=SIZE)
    for seed in range(versions.count):
        await successor.ask("change", share=SHARE, seed=seed)
    assert (
        await versions.wait_for_bytes(versions.receiver, await versions.stage_next(successor))
        < MOST
    )


@pytest.mark.rotating(5)
async def test_successor_of_a_killed_delta_receiver_gets_the_version(versions: Versions) -> None:
    digest = await versions.stage_next(versions.publisher)
    order = await versions.receive_half(digest)
    await versions.receiver.kill()
    versions.bench.resume_transfer()
    assert isinstance(await order, RuntimeError)
    receiver = await versions.new_receiver(1)
    assert await versions.wait_for_bytes(receiver, digest) < MOST
    digest = await versions.stage_next(versions.publisher)
    assert await versions.wait_for_bytes(receiver, digest) < MOST


@pytest.mark.deep
async def test_delta_continues_after_the_store_was_killed(versions: Versions) -> None:
    digest = await versions.stage_next(versions.publisher)
    order = await versions.receive_half(digest)
    await versions.bench.store.kill()
    versions.bench.resume_transfer()
    await versions.bench.restart_store()
    assert not isinstance(await order, OrderFailed | RuntimeError)
    assert await versions.receiver.ask("identity") == versions.identity
    await versions.wait_for_bytes(versions.receiver, await versions.stage_next(versions.publisher))
    after = await versions.stage_next(versions.publisher)
    await versions.receiver.ask("receive", digest=after)
    assert await versions.receiver.ask("identity") == versions.identity


NO_CHUNK = 100_000  # bytes, below those of a chunk: no file of this process gets larger
UNLIMITED = resource.RLIM_INFINITY


def limit_file_size(member: Member, size: int) -> None:
    """Limit each file that the process writes to that many bytes, like a full disk."""
    resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (size, UNLIMITED))


@pytest.mark.rotating(5)
async def test_trainer_with_a_full_disk_waits_without_a_partial_version(
    bench: TransferBench,
) -> None:
    await bench.begin()
    await bench.publisher.ask("model", name="little", seed=1)
    limit_file_size(bench.publisher, NO_CHUNK)
    staging = bench.scene.send_order(bench.publisher, "stage", version=1)
    await bench.waits(bench.publisher, on="disk")
    assert await bench.read_served_version(bench.engine) == 0
    limit_file_size(bench.publisher, UNLIMITED)
    staged = await staging
    await bench.commit(staged["digest"])
    await bench.wait_for_version(bench.engine)


@pytest.mark.rotating(5)
async def test_engine_with_a_full_disk_keeps_the_version_in_memory(bench: TransferBench) -> None:
    await bench.begin()
    limit_file_size(bench.engine, NO_CHUNK)
    await bench.publish()
    await bench.wait_for_version(bench.engine)
    limit_file_size(bench.engine, UNLIMITED)
    await bench.publish()
    await bench.wait_for_version(bench.engine)


SWEEPING = "tests.mesh.weights.sweeping_store"
KEPT = 3  # checkpoints, by `training.keep_checkpoints`


def list_digests(store: ChunkStore) -> set[str]:
    """Return the digests of all chunks there; others may be in flight."""
    names = {path.name for path in store.directory.glob("??/*")}
    return {name for name in names if not name.startswith(".")}


@pytest.mark.rotating(5)
async def test_engine_skips_a_version_collected_during_its_pull(bench: TransferBench) -> None:
    await bench.begin()
    store = ChunkStore(bench.scene.root(0) / "store")
    before = list_digests(store)
    bench.stall_after(0.4)
    await bench.publish()
    await bench.wait_until_stalled()
    new_chunks = list_digests(store) - before
    await bench.publish()
    store.delete_unchanged(store.read_write_times(new_chunks))
    assert await bench.read_served_version(bench.engine) == 0
    bench.resume_transfer()
    await bench.wait_for_version(bench.engine)


class CollectedVersion:
    """Version that the store has collected after others followed it."""

    def __init__(self, bench: TransferBench) -> None:
        self._bench, self._store = bench, ChunkStore(bench.scene.root(0) / "store")
        self._before = self._list_digests()

    def _list_digests(self) -> set[str]:
        return list_digests(self._store)

    async def stage_next(self) -> str:
        """Return the digest of the version."""
        digest = await self._bench.stage()
        self._chunks = self._list_digests() - self._before
        assert digest in self._chunks
        return digest

    async def collect(self) -> None:
        """Publish enough versions for this one to be collected, and wait until it is deleted."""
        for _ in range(KEPT):
            await self._bench.publish()
        await until(lambda: not any(map(self._store.has, self._chunks)), "it is gone")


@pytest.mark.deep
async def test_engine_skips_a_version_swept_during_its_pull(bench: TransferBench) -> None:
    await bench.begin(store=SWEEPING)
    swept = CollectedVersion(bench)
    bench.stall_after(0.4)
    await bench.commit(await swept.stage_next())
    await bench.wait_until_stalled()
    await swept.collect()
    assert await bench.read_served_version(bench.engine) == 0
    bench.resume_transfer()
    await bench.wait_for_version(bench.engine)


@pytest.mark.rotating(5)
async def test_pull_of_a_swept_version_fails_by_type(bench: TransferBench) -> None:
    await bench.begin(store=SWEEPING)
    receiver = await bench.scene.receiver(9, host=3)
    await receiver.ask("take", model=MODEL)
    swept = CollectedVersion(bench)
    bench.stall_after(0.4)
    digest = await swept.stage_next()
    receiving = bench.scene.send_order(receiver, "receive", digest=digest)
    await bench.wait_until_stalled()
    await bench.commit(digest)
    await swept.collect()
    bench.resume_transfer()
    failure = await receiving
    assert isinstance(failure, OrderFailed) and failure.code == "not_found", failure
    row = await jobs.read_job(bench.scene.state, "job")
    await receiver.ask("receive", digest=row.manifest)
    newest = models.drawn(MODEL, bench.seeds[-1])
    assert await receiver.ask("identity") == identity_of(newest)
    await bench.wait_for_version(bench.engine)


@pytest.mark.deep
async def test_new_store_serves_new_versions_after_its_host_was_lost(bench: TransferBench) -> None:
    await bench.begin()
    await bench.publish()
    await bench.wait_for_version(bench.engine)
    await bench.store.kill()
    await bench.publisher.kill()
    shutil.rmtree(bench.scene.root(0) / "store")
    late = await bench.new_engine()  # its host has all chunks, and no process lists them
    assert await bench.read_served_version(bench.engine) == 1
    await bench.restart_store()
    assert (
        await bench.read_served_version(bench.engine),
        await bench.read_served_version(late),
    ) == (
        1,
        -1,
    )
    bench.publisher = await bench.scene.publisher()
    await bench.publisher.ask("resume", step=1)
    await bench.publish()
    await bench.wait_for_version(bench.engine)
    await bench.wait_for_version(late)


ANYWHERE = pytest.mark.parametrize("share", [0.01, 0.5, 0.95])


@pytest.mark.rotating(5)
@ANYWHERE
async def test_pull_continues_after_the_store_was_killed(
    bench: TransferBench, share: float
) -> None:
    await bench.begin()
    bench.stall_after(share)
    await bench.publish()
    await bench.wait_until_stalled()
    assert await bench.read_served_version(bench.engine) == 0
    await bench.store.kill()
    bench.resume_transfer()  # so that the kernel's notice of the exit passes
    assert await bench.read_served_version(bench.engine) == 0
    await bench.restart_store()
    await bench.wait_for_version(bench.engine)


@pytest.mark.rotating(5)
@ANYWHERE
async def test_engine_killed_during_a_pull_is_replaced(bench: TransferBench, share: float) -> None:
    await bench.begin()
    bench.stall_after(share)
    await bench.publish()
    await bench.wait_until_stalled()
    await bench.engine.kill()
    bench.resume_transfer()
    await bench.wait_for_version(await bench.new_engine())


@pytest.mark.rotating(5)
@ANYWHERE
async def test_trainer_killed_during_staging_is_replaced(
    bench: TransferBench, share: float
) -> None:
    await bench.begin(far=True)
    bench.stall_after(share)
    await bench.publisher.ask("model", name=MODEL, seed=1)
    staging = bench.scene.send_order(bench.publisher, "stage", version=1)
    await bench.wait_until_stalled()
    await bench.publisher.kill()
    await staging
    await bench.evict_name(bench.publisher.name)
    bench.resume_transfer()
    assert await bench.read_served_version(bench.engine) == 0
    bench.publisher = await bench.scene.publisher(host=2)
    await bench.publisher.ask("resume", step=0)
    await bench.publish()
    await bench.wait_for_version(bench.engine)


@pytest.mark.rotating(5)
async def test_killed_source_host_is_replaced_by_another(bench: TransferBench) -> None:
    await bench.begin()
    first, proxy = await bench.start_agent_behind_proxy(1)
    _, other = await bench.start_agent_behind_proxy(2)
    create_neighbor_host = await bench.new_engine(host=2)
    await bench.publish()
    for engine in (bench.engine, create_neighbor_host):
        await bench.wait_for_version(engine)
    bench.stall_after(0.0)  # the store gives nothing any more
    bench.stall_after(0.0, other)
    bench.stall_after(0.5, proxy)
    engine = await bench.new_engine(host=3)
    await bench.wait_until_stalled(proxy)
    await first.kill()
    assert await bench.read_served_version(engine) == -1
    proxy.stall_at_bytes = other.stall_at_bytes = ENDLESS
    given, before = other.carried_bytes, bench.proxy.carried_bytes
    await bench.wait_for_version(engine)
    assert other.carried_bytes - given > 0.3 * WHOLE > bench.proxy.carried_bytes - before


OTHERS_BYTES_S = 20 << 20
SLOW_BYTES_S = OTHERS_BYTES_S // 100


@pytest.mark.deep
async def test_stalled_source_host_is_replaced_by_another(bench: TransferBench) -> None:
    await bench.begin()
    agent = await bench.scene.agent(1)
    await bench.publish()
    await bench.wait_for_version(bench.engine)
    agent.signal(signal.SIGSTOP)  # its kernel accepts connections, and the process does not answer
    try:
        engine = await bench.new_engine(host=3)
        await bench.wait_for_version(engine)
    finally:
        agent.signal(signal.SIGCONT)


@pytest.mark.rotating(5)
async def test_stalled_store_is_replaced_by_a_host_with_the_version(
    bench: TransferBench,
) -> None:
    await bench.begin()
    await bench.scene.agent(1)
    await bench.publish()
    await bench.wait_for_version(bench.engine)
    bench.stall_after(0.0)  # the store's bulk port transfers nothing more; its other port does
    engine = await bench.new_engine(host=3)
    await bench.wait_for_version(engine)


@pytest.mark.deep
async def test_slow_receiver_does_not_delay_others(bench: TransferBench) -> None:
    await bench.begin()
    bench.scene.settings(
        3, rate_down=int(SLOW_BYTES_S / scaled(1.0))
    )  # of the bandwidth of other receivers
    slow = await bench.new_engine(host=3)
    bench.scene.settings(4, rate_down=OTHERS_BYTES_S)
    other = await bench.new_engine(host=4)
    await bench.wait_for_version(other)
    await bench.publish()
    await asyncio.gather(*(until_served(bench, engine) for engine in (bench.engine, other)))
    assert await bench.read_served_version(slow) == -1  # a version takes most of a minute
    list_chunks = bench.scene.root(3) / "chunks"

    def has_some_chunks() -> bool:
        return any(part.is_file() and part.stat().st_size for part in list_chunks.rglob("*"))

    await until(has_some_chunks, "the slow one has a part")


async def until_served(bench: TransferBench, engine: Member) -> None:
    """Wait until the engine has the newest version, whatever it answers before."""
    async with asyncio.timeout(scaled(WITHIN_S)):
        while (await engine.ask("serves"))["version"] < len(bench.seeds) - 1:
            await asyncio.sleep(POLL_S)


OTHER = 70  # seed of the successor's version


@pytest.mark.rotating(5)
async def test_replaced_trainer_commits_no_version(bench: TransferBench) -> None:
    await bench.begin()
    first = bench.publisher
    await first.ask("model", name=MODEL, seed=1)
    staged = (await first.ask("stage", version=1))["digest"]
    first.signal(signal.SIGSTOP)
    second = await bench.scene.publisher()
    await second.ask("resume", step=0)
    digest = await bench.stage(OTHER, second)
    await bench.commit(digest, OTHER, second)
    first.signal(signal.SIGCONT)
    late = await bench.scene.send_order(first, "commit", digest=staged)
    assert isinstance(late, Exception), late  # rejected, or exited when it woke up
    assert getattr(late, "code", "lost") in ("fenced", "lost", "refused"), late
    await bench.wait_for_version(bench.engine)
    bench.publisher = second
    await bench.publish()
    await bench.wait_for_version(bench.engine)
