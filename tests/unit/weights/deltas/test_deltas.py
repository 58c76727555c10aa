"""A host that has a version gets the next one as what changed; whatever goes wrong with that, it
gets it.
"""

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
TOGETHER = 4  # chunks whose deltas are reported together
SIZE = CHUNK * CHUNKS
SHARE = 0.01  # of the elements that change from a version to the next


class Hosts(ProcessesOnHosts):
    """A head with a weight store and a trainer, a way from there, and a host of engines."""

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
        """Return the versions that deltas to another version would start from."""
        target = await self.stage(None)
        asked = BeginDelta("j", target, 0, host=self.trainer.settings.host)
        return (await self.trainer.ref(STORE_NAME).call(Weights.begin_deltas, asked)).bases

    async def stage(self, deltas: DeltaSender | None) -> VersionRef:
        """Stage the next version with the deltas that are requested."""
        number = len(self.versions)
        if number:
            for place, tensor in enumerate(self.weights):
                drawn = torch.Generator().manual_seed(1000 * number + place)
                changes = torch.rand(len(tensor), generator=drawn) < SHARE
                self.weights[place] = torch.where(changes, -tensor, tensor)
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
        bulk, group = BulkClient(self.trainer), TOGETHER * CHUNK
        return DeltaSender(self.trainer, bulk, "j", config, max_group_bytes=group)


class Engine:
    """Receiver of versions on a host, with its counters."""

    def __init__(self, hosts: Hosts, mesh: Mesh) -> None:
        self.hosts, self.mesh, self.bulk = hosts, mesh, BulkClient(mesh)
        self.cache = ChunkStore(Path(mesh.settings.run_root) / "chunks")
        self.receiver = WeightReceiver(mesh, self.bulk, wants_deltas=True)

    async def receive(self, version: VersionRef) -> int:
        """Return the bytes received for a version, once all of it is here and valid."""
        before = self.hosts.proxy.carried_bytes
        image = await self.receiver.receive(version.manifest)
        for place, tensor in enumerate(self.hosts.weights):
            if version == self.hosts.versions[-1]:
                assert torch.equal(image.tensors[f"layers.{place}"], tensor)
        return self.hosts.proxy.carried_bytes - before

    def count(self, what: str) -> float:
        return self.mesh.telemetry.counters.get(what, 0)


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    made = Hosts(tmp_path, open_simulated_state(SystemClock()))
    async with made.served("127.0.0.2"):
        yield made


@pytest.mark.rotating(3)
async def test_the_next_version_comes_as_what_changed(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        assert SIZE < await engine.receive(await hosts.stage(deltas)) < SIZE * 1.1
        for _ in range(3):
            assert await engine.receive(await hosts.stage(deltas)) < SIZE * SHARE * 3
    assert engine.count("deltas_applied") == 3 * CHUNKS
    assert engine.count("deltas_refused") == 0
    assert hosts.service.stats()["delta_chunks"] == 3 * CHUNKS


async def test_none_are_made_where_nobody_on_another_host_receives(hosts: Hosts) -> None:
    async with hosts.deltas() as deltas:
        await hosts.stage(deltas)
        await hosts.stage(deltas)
    assert hosts.trainer.telemetry.counters.get("deltas_made", 0) == 0
    assert hosts.service.stats()["delta_versions"] == 0


async def test_a_base_moves_on_with_what_was_acknowledged_alone(hosts: Hosts) -> None:
    """Check that a receiver that missed a version gets the next one from its own base."""
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        for _ in range(3):
            newest = await hosts.stage(deltas)
        assert await engine.receive(newest) < SIZE * SHARE * 3 * 3
    assert engine.count("deltas_applied") == CHUNKS


@pytest.mark.rotating(3)
async def test_a_new_host_pulls_in_full_and_does_not_wait(hosts: Hosts) -> None:
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
async def test_one_who_fell_behind_catches_up_from_an_anchor(hosts: Hosts) -> None:
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


async def test_what_a_host_has_whole_is_a_base_and_nothing_else(hosts: Hosts) -> None:
    first, engine = await hosts.stage(None), await hosts.engine()
    part = dict.fromkeys(["layers.0", "layers.1"])
    await engine.receiver.receive(first.manifest, part)
    assert await hosts.bases() == []
    await WeightReceiver(engine.mesh, engine.bulk).receive(
        first.manifest
    )  # it is not there for the next
    assert await hosts.bases() == []
    await engine.receiver.receive(first.manifest, part)
    assert await hosts.bases() == [first], "all of it is there by now"


@pytest.mark.parametrize("chunks", [0, CHUNKS // 2])
async def test_what_is_in_memory_alone_is_no_base(hosts: Hosts, chunks: int) -> None:
    first, engine = await hosts.stage(None), await hosts.engine(chunks_bytes=chunks * CHUNK)
    await engine.receive(first)
    assert await hosts.bases() == []


async def test_none_are_made_for_the_host_that_makes_them(hosts: Hosts) -> None:
    hosts.trainer = hosts.process("trainer/far", "third")
    await hosts.trainer.join(None)
    near = await hosts.engine("engine/g0", "third")
    async with hosts.deltas() as deltas:
        assert await near.receive(await hosts.stage(deltas)) < CHUNK, "it has staged the chunks"
        await hosts.stage(deltas)
    assert hosts.service.stats()["delta_versions"] == 0


async def test_an_unforeseen_error_is_told_and_versions_go_in_full(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(first := await hosts.stage(deltas))
        told = await hosts.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, ManifestRequest(first.manifest)
        )
        broken = hosts.store.chunk_path(told.tensors[0].chunk)
        broken.unlink()
        broken.mkdir()  # cannot be read as a file
        with capture_logs() as lines:
            newest = await hosts.stage(deltas)
        [line] = [line for line in lines if line["event"] == "no delta"]
        assert line["log_level"] == "error" and line["exc_info"]
        assert hosts.trainer.telemetry.counters["deltas_failed"] == 1
        assert deltas.stats()["deltas_trouble"].startswith("IsADirectoryError: ")
        asked = DeltaQuery(newest.manifest, "second")
        assert not (await hosts.trainer.ref(STORE_NAME).call(Weights.fetch_deltas, asked)).has_more
        assert await engine.receive(newest) > SIZE / 2
        assert await engine.receive(await hosts.stage(deltas)) < SIZE * SHARE * 3
        assert deltas.stats()["deltas_trouble"] == ""


async def test_an_error_is_not_told_of_once_nobody_wants_deltas(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(first := await hosts.stage(deltas))
        told = await hosts.trainer.ref(STORE_NAME).call(
            Weights.fetch_manifest, ManifestRequest(first.manifest)
        )
        broken = hosts.store.chunk_path(told.tensors[0].chunk)
        broken.unlink()
        broken.mkdir()
        await hosts.stage(deltas)
        assert deltas.stats()["deltas_trouble"]
        hosts.service.delta_registry.forget_job("j")  # as where no host has any of its versions
        await hosts.stage(deltas)
        assert deltas.stats()["deltas_trouble"] == ""


async def missing(engine: Engine, version: VersionRef) -> dict[str, int]:
    """Return the bytes by digest of the chunks that a host misses of a version."""
    image = VersionImage(await engine.receiver.fetch_manifest(version.manifest))
    return {d: size for d, size in image.chunk_sizes.items() if not engine.cache.has(d)}


async def made_of_deltas(
    engine: Engine, newest: VersionRef, lacking: dict[str, int], needed: Collection[str] = ()
) -> set[str]:
    version = VersionToFetch("", newest.manifest, lacking, needed)
    return await make_chunks_from_deltas(engine.mesh, engine.bulk, version, engine.cache)


async def test_deltas_that_stall_are_left_to_the_pull(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        hosts.proxy.stall_at_bytes = hosts.proxy.carried_bytes + 3000  # amid one
        lacking = await missing(engine, newest)
        async with asyncio.timeout(scaled(6)):
            made = await made_of_deltas(engine, newest, lacking)
        assert len(made) < len(lacking) and hosts.proxy.carried_bytes >= hosts.proxy.stall_at_bytes
        hosts.proxy.stall_at_bytes = 1 << 40
        await engine.receive(newest)


async def test_deltas_do_not_take_the_room_of_what_is_there_of_the_version(hosts: Hosts) -> None:
    engine = await hosts.engine(chunks_bytes=(CHUNKS + 1) * CHUNK)
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
    there, *_ = lacking = await missing(engine, newest)
    engine.cache.write(hosts.store.read(there))
    before = engine.mesh.clock.wall() - 1000  # unused for longer than all others
    os.utime(engine.cache.chunk_path(there), (before, before))
    assert lacking.pop(there)
    await made_of_deltas(engine, newest, lacking, needed=[there])
    assert engine.cache.has(there)


async def test_a_file_that_was_there_is_not_taken_for_right(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
    lacking = await missing(engine, newest)
    wrong, right, *_ = (engine.cache.chunk_path(digest) for digest in lacking)
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_bytes(bytes(CHUNK))
    await made_of_deltas(engine, newest, lacking)
    assert engine.cache.is_verified(right.name) and not engine.cache.is_verified(wrong.name)
    await engine.receive(newest)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("harm", ["old chunk", "blob", "no blob"])
async def test_what_a_delta_does_not_make_is_pulled(hosts: Hosts, harm: str) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        told = await hosts.trainer.ref(STORE_NAME).call(
            Weights.fetch_deltas, DeltaQuery(newest.manifest, "")
        )
        delta = told.chunks[0]
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
    lost = 1 if harm == "old chunk" else TOGETHER
    assert lost * CHUNK < carried < lost * CHUNK + SIZE * SHARE * 3 + CHUNK / 2
    assert engine.count("deltas_applied") == CHUNKS - lost
    assert all(
        engine.cache.read(delta.new_chunk) for delta in told.chunks
    )  # each matches its digest


async def test_a_delta_from_another_chunk_is_refused(hosts: Hosts) -> None:
    """Check that a delta to other bytes than the named chunk's is rejected, whichever process
    reports it.
    """
    engine, store = await hosts.engine(), hosts.trainer.ref(STORE_NAME)
    async with hosts.deltas() as deltas:
        await engine.receive(first := await hosts.stage(deltas))
        newest = await hosts.stage(None)
    asked = [
        store.call(Weights.fetch_manifest, ManifestRequest(one.manifest)) for one in (first, newest)
    ]
    pairs = pair_chunks(*[(await one).tensors for one in asked])
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
    told = StageDelta(DeltaSet(first, newest, swapped), is_last=True)
    assert await store.call(Weights.stage_deltas, told)
    assert await engine.receive(newest) > SIZE
    assert engine.count("deltas_refused") == CHUNKS and engine.count("deltas_applied") == 0


async def test_a_host_makes_a_chunk_once(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    # A store that is slower than that is done without, which a busy machine makes of it.
    monkeypatch.setattr(receiver, "MAX_WAIT_S", scaled(receiver.MAX_WAIT_S))
    engines = [await hosts.engine(f"engine/g{n}") for n in range(3)]
    async with hosts.deltas() as deltas:
        await engines[0].receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        carried = hosts.proxy.carried_bytes
        await asyncio.gather(*(engine.receive(newest) for engine in engines))
        assert hosts.proxy.carried_bytes - carried < SIZE * SHARE * 3
    names = [path.name for path in engines[0].cache.directory.glob("??/*")]
    assert len(names) == 2 * CHUNKS + -(-CHUNKS // TOGETHER)  # two versions, and the blobs
    assert all(
        compute_digest(engines[0].cache.chunk_path(name).read_bytes()) == name for name in names
    )


async def test_a_trainer_far_from_the_store_makes_them_of_what_its_host_keeps(hosts: Hosts) -> None:
    engine = await hosts.engine()
    hosts.trainer = hosts.process("trainer/far", "third")
    await hosts.trainer.join(None)
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        newest = await hosts.stage(deltas)
        assert await engine.receive(newest) < SIZE * SHARE * 3
    assert engine.count("deltas_applied") == CHUNKS


async def test_a_store_that_forgets_costs_one_full_version(hosts: Hosts) -> None:
    engine = await hosts.engine()
    async with hosts.deltas() as deltas:
        await engine.receive(await hosts.stage(deltas))
        hosts.service.delta_registry.forget_job("j")  # as one that was started again
        assert await engine.receive(await hosts.stage(deltas)) > SIZE
        assert await engine.receive(await hosts.stage(deltas)) < SIZE * SHARE * 3
