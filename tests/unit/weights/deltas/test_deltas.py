"""Deltas between versions, with a full pull as the fallback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from loadtests.weights.contents import staged_whole
from meshrl.common.api.transfer.deltas import (
    BeginDelta,
    ChunkDelta,
    DeltaQuery,
    DeltaSet,
    StageDelta,
    VersionRef,
)
from meshrl.common.api.weights import STORE_NAME, ManifestRequest, Weights
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.digest import compute_digest
from meshrl.common.job.config import TrainingConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore
from meshrl.common.weights.delta import receiver
from meshrl.common.weights.delta.codec import pair_chunks
from meshrl.common.weights.delta.files import make_delta, save_delta
from meshrl.common.weights.delta.receiver import make_chunks_from_deltas
from meshrl.common.weights.delta.sender import DeltaSender
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.unit.weights.store_processes import ProcessesOnHosts

CHUNK = 100_000
CHUNKS = 18
GROUP_CHUNKS = 4  # chunks whose deltas are published together
SIZE = CHUNK * CHUNKS
SHARE = 0.01  # share of the elements that change from a version to the next


class Hosts(ProcessesOnHosts):
    """Head with a weight store and a trainer, a proxy in front of the store, and hosts of
    engines.
    """

    def __init__(self, root: Path, state: StateClient) -> None:
        super().__init__(root, state)
        generator = torch.Generator().manual_seed(1)
        self.weights = [
            torch.randn(CHUNK // 2, generator=generator).bfloat16() for _ in range(CHUNKS)
        ]
        self.versions: list[VersionRef] = []

    async def engine(self, name: str = "engine/g0", host: str = "second", **more: int) -> Engine:
        mesh = self.process(name, host, **more)
        await mesh.join(None)
        return Engine(self, mesh)

    async def bases(self) -> list[VersionRef]:
        """Return the versions that deltas to the next version would start from."""
        target = await self.stage(None)
        request = BeginDelta("j", target, 0, host=self.trainer.settings.host)
        return (await self.trainer.ref(STORE_NAME).call(Weights.begin_deltas, request)).bases

    async def stage(self, deltas: DeltaSender | None) -> VersionRef:
        """Stage the next version with the deltas that are requested."""
        number = len(self.versions)
        if number:
            for index, tensor in enumerate(self.weights):
                generator = torch.Generator().manual_seed(1000 * number + index)
                changes = torch.rand(len(tensor), generator=generator) < SHARE
                self.weights[index] = torch.where(changes, -tensor, tensor)
        tensors = {f"layers.{i}": tensor for i, tensor in enumerate(self.weights)}
        bulk = BulkClient(self.trainer)
        digest = await staged_whole(self.trainer, bulk, "j", 0, number, tensors, most=CHUNK)
        self.versions.append(VersionRef(0, number, digest))
        if deltas is not None:
            await deltas.start(self.versions[-1])
            await deltas.wait_until_done()
        return self.versions[-1]

    def deltas(self, anchors: int = 0) -> DeltaSender:
        config = TrainingConfig(delta_anchors=anchors)
        bulk, group = BulkClient(self.trainer), GROUP_CHUNKS * CHUNK
        return DeltaSender(self.trainer, bulk, "j", config, max_group_bytes=group)


class Engine:
    """Receiver of versions on a host, with its counters."""

    def __init__(self, hosts: Hosts, mesh: Mesh) -> None:
        self.hosts, self.mesh, self.bulk = hosts, mesh, BulkClient(mesh)
        self.cache = ChunkStore(Path(mesh.settings.run_root) / "chunks")
        self.receiver = WeightReceiver(mesh, self.bulk, wants_deltas=True)

    async def receive(self, version: VersionRef) -> int:
        """Receive a version, check it, and return the bytes that it took."""
        before = self.hosts.proxy.carried_bytes
        image = await self.receiver.receive(version.manifest)
        for index, tensor in enumerate(self.hosts.weights):
            if version == self.hosts.versions[-1]:
                assert torch.equal(image.tensors[f"layers.{index}"], tensor)
        return self.hosts.proxy.carried_bytes - before

    def count(self, what: str) -> float:
        return self.mesh.telemetry.counters.get(what, 0)


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    bench = Hosts(tmp_path, open_simulated_state(SystemClock()))
    async with bench.run_store("127.0.0.2"):
        yield bench


@pytest.mark.rotating(3)
async def test_next_version_is_fetched_as_deltas(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        assert SIZE < await engine.receive(await hosts.stage(deltas)) < SIZE * 1.1
        for _ in range(3):
            assert await engine.receive(await hosts.stage(deltas)) < SIZE * SHARE * 3
    assert engine.count("deltas_applied") == 3 * CHUNKS
    assert engine.count("deltas_refused") == 0
    assert hosts.service.stats()["delta_chunks"] == 3 * CHUNKS


async def test_no_deltas_are_made_without_receivers_on_other_hosts(hosts: Hosts) -> None:
    async with hosts.deltas() as deltas:
        await hosts.stage(deltas)
        await hosts.stage(deltas)
    assert hosts.trainer.telemetry.counters.get("deltas_made", 0) == 0
    assert hosts.service.stats()["delta_versions"] == 0


async def test_receiver_that_missed_versions_gets_deltas_from_its_own_base(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        for _ in range(3):
            newest = await hosts.stage(deltas)
        assert await engine.receive(newest) < SIZE * SHARE * 3 * 3
    assert engine.count("deltas_applied") == CHUNKS


@pytest.mark.rotating(3)
async def test_new_host_pulls_a_full_version_without_waiting(hosts: Hosts) -> None:
    first, second = await hosts.engine(), await hosts.engine("engine/g1", "third")
    async with hosts.deltas() as deltas:
        await first.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        assert await second.receive(newest) > SIZE
        assert await first.receive(newest) < SIZE * SHARE * 3
        newest = await hosts.stage(deltas)
        for engine in (first, second):
            assert await engine.receive(newest) < SIZE * SHARE * 3


@pytest.mark.rotating(3)
async def test_host_that_fell_behind_catches_up_from_an_anchor(hosts: Hosts) -> None:
    engines = [await hosts.engine(f"engine/g{n}", f"host{n}") for n in range(3)]
    async with hosts.deltas(anchors=2) as deltas:
        for _ in range(2):
            newest = await hosts.stage(deltas)
            for engine in engines:
                await engine.receive(newest)
        newest = await hosts.stage(deltas)
        for engine in engines[1:]:
            await engine.receive(newest)
        newest = await hosts.stage(deltas)
        assert await engines[0].receive(newest) < SIZE * SHARE * 3 * 3
    assert engines[0].count("deltas_applied") == 2 * CHUNKS


async def test_only_complete_versions_of_a_host_are_bases(hosts: Hosts) -> None:
    first, engine = await hosts.stage(None), await hosts.engine()
    part = dict.fromkeys(["layers.0", "layers.1"])
    await engine.receiver.receive(first.manifest, part)
    assert await hosts.bases() == []
    # this receiver does not acknowledge versions
    await WeightReceiver(engine.mesh, engine.bulk).receive(first.manifest)
    assert await hosts.bases() == []
    await engine.receiver.receive(first.manifest, part)
    assert await hosts.bases() == [first], "all chunks are present by now"


@pytest.mark.parametrize("chunks", [0, CHUNKS // 2])
async def test_version_outside_the_chunk_cache_is_no_base(hosts: Hosts, chunks: int) -> None:
    first, engine = await hosts.stage(None), await hosts.engine(chunks_bytes=chunks * CHUNK)
    await engine.receive(first)
    assert await hosts.bases() == []


async def test_no_deltas_are_made_for_the_trainers_own_host(hosts: Hosts) -> None:
    hosts.trainer = hosts.process("trainer/far", "third")
    await hosts.trainer.join(None)
    near = await hosts.engine("engine/g0", "third")
    async with hosts.deltas() as deltas:
        assert await near.receive(await hosts.stage(deltas)) < CHUNK, (
            "the host has staged the chunks"
        )
        await hosts.stage(deltas)
    assert hosts.service.stats()["delta_versions"] == 0


async def test_unexpected_error_is_logged_and_versions_are_sent_in_full(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(first := await hosts.stage(deltas))
        manifest = await hosts.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, ManifestRequest(first.manifest)
        )
        broken = hosts.store.chunk_path(manifest.tensors[0].chunk)
        broken.unlink()
        broken.mkdir()  # cannot be read as a file
        with capture_logs() as lines:
            newest = await hosts.stage(deltas)
        [line] = [line for line in lines if line["event"] == "no delta"]
        assert line["log_level"] == "error" and line["exc_info"]
        assert hosts.trainer.telemetry.counters["deltas_failed"] == 1
        assert deltas.stats()["deltas_trouble"].startswith("IsADirectoryError: ")
        query = DeltaQuery(newest.manifest, "second")
        assert not (await hosts.trainer.ref(STORE_NAME).call(Weights.fetch_deltas, query)).has_more
        assert await engine.receive(newest) > SIZE / 2
        assert await engine.receive(await hosts.stage(deltas)) < SIZE * SHARE * 3
        assert deltas.stats()["deltas_trouble"] == ""


async def test_error_is_cleared_once_no_host_wants_deltas(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(first := await hosts.stage(deltas))
        manifest = await hosts.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, ManifestRequest(first.manifest)
        )
        broken = hosts.store.chunk_path(manifest.tensors[0].chunk)
        broken.unlink()
        broken.mkdir()
        await hosts.stage(deltas)
        assert deltas.stats()["deltas_trouble"]
        hosts.service.delta_registry.forget_job("j")  # as if no host had any of its versions
        await hosts.stage(deltas)
        assert deltas.stats()["deltas_trouble"] == ""


async def find_missing(engine: Engine, version: VersionRef) -> dict[str, int]:
    """Return the bytes by digest of the chunks that a host misses of a version."""
    image = VersionImage(await engine.receiver.fetch_manifest(version.manifest))
    return {d: size for d, size in image.chunk_sizes.items() if not engine.cache.has(d)}


async def make_from_deltas(
    engine: Engine, newest: VersionRef, missing_chunks: dict[str, int], needed: Collection[str] = ()
) -> set[str]:
    version = VersionToFetch("", newest.manifest, missing_chunks, needed)
    return await make_chunks_from_deltas(engine.mesh, engine.bulk, version, engine.cache)


async def test_stalled_deltas_fall_back_to_the_pull(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        hosts.proxy.stall_at_bytes = hosts.proxy.carried_bytes + 3000  # in the middle of a delta
        missing_chunks = await find_missing(engine, newest)
        async with asyncio.timeout(scaled(6)):
            made_chunks = await make_from_deltas(engine, newest, missing_chunks)
        assert (
            len(made_chunks) < len(missing_chunks)
            and hosts.proxy.carried_bytes >= hosts.proxy.stall_at_bytes
        )
        hosts.proxy.stall_at_bytes = 1 << 40
        await engine.receive(newest)


async def test_deltas_evict_no_chunks_of_the_version(hosts: Hosts) -> None:
    engine = await hosts.engine(chunks_bytes=(CHUNKS + 1) * CHUNK)
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
    present, *_ = missing_chunks = await find_missing(engine, newest)
    engine.cache.write(hosts.store.read(present))
    unused_since = engine.mesh.clock.wall() - 1000  # least recently used
    os.utime(engine.cache.chunk_path(present), (unused_since, unused_since))
    assert missing_chunks.pop(present)
    await make_from_deltas(engine, newest, missing_chunks, needed=[present])
    assert engine.cache.has(present)


async def test_existing_file_is_not_taken_for_verified(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
    missing_chunks = await find_missing(engine, newest)
    unverified_path, verified_path, *_ = (
        engine.cache.chunk_path(digest) for digest in missing_chunks
    )
    unverified_path.parent.mkdir(exist_ok=True)
    unverified_path.write_bytes(bytes(CHUNK))
    await make_from_deltas(engine, newest, missing_chunks)
    assert engine.cache.is_verified(verified_path.name) and not engine.cache.is_verified(
        unverified_path.name
    )
    await engine.receive(newest)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("harm", ["old chunk", "blob", "no blob"])
async def test_chunks_that_deltas_cannot_make_are_pulled(hosts: Hosts, harm: str) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        batch = await hosts.trainer.ref(STORE_NAME).call(
            Weights.fetch_deltas, DeltaQuery(newest.manifest, "")
        )
        delta = batch.chunks[0]
        flipped = {
            "old chunk": engine.cache.chunk_path(delta.old_chunk),
            "blob": hosts.store.chunk_path(delta.blob),
        }
        if path := flipped.get(harm):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        else:
            hosts.store.chunk_path(delta.blob).unlink()
        carried = await engine.receive(newest)
    lost = 1 if harm == "old chunk" else GROUP_CHUNKS
    assert lost * CHUNK < carried < lost * CHUNK + SIZE * SHARE * 3 + CHUNK / 2
    assert engine.count("deltas_applied") == CHUNKS - lost
    # each matches its digest
    assert all(engine.cache.read(delta.new_chunk) for delta in batch.chunks)


async def test_delta_from_another_chunk_is_rejected_by_its_digest(hosts: Hosts) -> None:
    engine, store = await hosts.engine(), hosts.trainer.ref(STORE_NAME)
    async with hosts.deltas() as deltas:
        await engine.receive(first := await hosts.stage(deltas))
        newest = await hosts.stage(None)
    requests = [
        store.call(Weights.fetch_manifest, ManifestRequest(one.manifest)) for one in (first, newest)
    ]
    pairs = pair_chunks(*[(await one).tensors for one in requests])
    assert (await store.call(Weights.begin_deltas, BeginDelta("j", newest, 0))).bases == [first]
    swapped = []
    for pair, other in zip(pairs, pairs[1:] + pairs[:1], strict=True):
        blob = make_delta([hosts.store], pair)
        assert blob is not None
        swapped.append(
            ChunkDelta(
                other.old_digest, pair.new_digest, save_delta(hosts.store, blob), 0, len(blob)
            )
        )
    staging = StageDelta(DeltaSet(first, newest, swapped), is_last=True)
    assert await store.call(Weights.stage_deltas, staging)
    assert await engine.receive(newest) > SIZE
    assert engine.count("deltas_refused") == CHUNKS and engine.count("deltas_applied") == 0


async def test_host_makes_each_chunk_once(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine slows the store beyond the time after which receivers do without it.
    monkeypatch.setattr(receiver, "MAX_WAIT_S", scaled(receiver.MAX_WAIT_S))
    engines = [await hosts.engine(f"engine/g{n}") for n in range(3)]
    async with hosts.deltas() as deltas:
        await engines[0].receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        carried = hosts.proxy.carried_bytes
        await asyncio.gather(*(engine.receive(newest) for engine in engines))
        assert hosts.proxy.carried_bytes - carried < SIZE * SHARE * 3
    names = [path.name for path in engines[0].cache.directory.glob("??/*")]
    assert len(names) == 2 * CHUNKS + -(-CHUNKS // GROUP_CHUNKS)  # two versions, and the blobs
    assert all(
        compute_digest(engines[0].cache.chunk_path(name).read_bytes()) == name for name in names
    )


async def test_trainer_on_another_host_makes_deltas_from_its_own_cache(hosts: Hosts) -> None:
    engine = await hosts.engine()
    hosts.trainer = hosts.process("trainer/far", "third")
    await hosts.trainer.join(None)
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        assert await engine.receive(newest) < SIZE * SHARE * 3
    assert engine.count("deltas_applied") == CHUNKS


async def test_restarted_store_costs_one_full_version(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        hosts.service.delta_registry.forget_job("j")  # as after a restart of the store
        assert await engine.receive(await hosts.stage(deltas)) > SIZE
        assert await engine.receive(await hosts.stage(deltas)) < SIZE * SHARE * 3
