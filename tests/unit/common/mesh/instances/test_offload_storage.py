"""Copies of a process's tensors: replaced as a whole, and cancelled between two chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.calls.role import RoleControl
from meshrl.common.api.node import Worker
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, StorageFull
from meshrl.common.base.files.offloaded_tensors import (
    CHUNK_BYTES,
    OLD_MAGIC,
    PIECE_BYTES,
    Cancellation,
    CopyCancelled,
    Octets,
)
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.offload_storage import OffloadStorage
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.device_copies import DeviceCopies
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.instances.segments import MemorySegments, SegmentCallsMixin
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedHost, virtual
from tests.unit.common.model.test_tensor_storages import RecordedDriver

WORKER, PROCESS = "worker/w0", "trainer/j"
BYTES = 2 * CHUNK_BYTES + 5
TIERS = [Tier.MEMORY, Tier.DISK]


class SegmentCalls(Interface):
    """Part of a worker's interface that handles segments."""


SegmentCalls.methods = {
    name: method for name, method in Worker.methods.items() if name.endswith("_segment")
}


class SegmentWorker(SegmentCallsMixin):
    interface = SegmentCalls

    def __init__(self, segments: MemorySegments, mesh: Mesh) -> None:
        self.segments, self._mesh = segments, mesh

    async def is_process(self, name: str, incarnation: str, owner: str | bytes) -> bool:
        return True


class UnmapCalls(Interface):
    """Part of a role process's interface that handles segments."""


UnmapCalls.methods = {
    name: method for name, method in RoleControl.methods.items() if name.endswith("_segment")
}


class SegmentUser(Actor):
    interface = UnmapCalls

    def __init__(self, storage: OffloadStorage) -> None:
        self.storage = storage

    @call(RoleControl.unmap_segment)
    def unmap_segment(self, inode: int) -> None:
        self.storage.unmap(inode)


class Bytes:
    """One tensor of equal bytes, whose n-th copied piece sets `cancel`."""

    def __init__(self, value: int, cancel: Cancellation | None = None, piece: int = 0) -> None:
        self.sizes_bytes, self.piece_bytes = {"a": BYTES}, PIECE_BYTES
        self.content = np.full(BYTES, value, np.uint8)
        self._cancel, self._pieces_left = cancel, piece

    def read_into(self, name: str, start: int, out: Octets) -> None:
        self._count_piece()
        out[:] = self.content[start : start + len(out)]

    def write(self, name: str, start: int, piece: Octets) -> None:
        self._count_piece()
        self.content[start : start + len(piece)] = piece

    def _count_piece(self) -> None:
        self._pieces_left -= 1
        if self._pieces_left < 0 and self._cancel is not None:
            self._cancel.request()


class Bench:
    def __init__(
        self, storage: OffloadStorage, other: OffloadStorage, segments: MemorySegments, files: Path
    ) -> None:
        self.storage, self.segments, self.files = storage, segments, files
        self.other = other  # of another process

    async def read(self, tier: Tier) -> set[int]:
        """Return the values of the copy at a tier."""
        restored = Bytes(0)
        await self.storage.restore(tier, restored)
        return {int(restored.content.min()), int(restored.content.max())}


@asynccontextmanager
async def open_bench(
    clock: Clock, random: Random, files: Path, budget: int = 0
) -> AsyncIterator[Bench]:
    network, state = MemoryNetwork(clock, random.child("network")), open_simulated_state(clock)

    def make_mesh(name: str) -> Mesh:
        transport = MemoryTransport(network, f"mem://{name}")
        host = SimulatedHost(clock, random.child(name))
        seams = MeshDependencies(
            state=state, transport=transport, clock=clock, random=random.child(name), host=host
        )
        return Mesh(name, name.partition("/")[0], seams)

    worker, process, second = (make_mesh(name) for name in (WORKER, PROCESS, "trainer/other"))
    async with MemorySegments(lambda: 1 << 40, budget, WORKER) as segments:
        await worker.join(SegmentWorker(segments, worker))
        storage = OffloadStorage(process, WORKER, str(files), "optimizer")
        await process.join(SegmentUser(storage))
        await second.join(None)
        other = OffloadStorage(second, WORKER, str(files), "optimizer")
        yield Bench(storage, other, segments, files)
        await second.leave()
        await process.leave()
        await worker.leave()


@pytest.mark.parametrize("tier", TIERS)
@virtual
async def test_cancelled_copy_leaves_the_earlier_one_whole(
    clock: Clock, random: Random, tmp_path: Path, tier: Tier
) -> None:
    async with open_bench(clock, random, tmp_path) as bench:
        await bench.storage.save(tier, {}, Bytes(1))
        size_bytes = bench.storage.stored_bytes[tier]
        for piece in (0, CHUNK_BYTES // PIECE_BYTES):
            cancel = Cancellation()
            with pytest.raises(CopyCancelled):
                await bench.storage.save(tier, {}, Bytes(2, cancel, piece), cancel)
            assert bench.storage.stored_bytes[tier] == size_bytes
            assert await bench.read(tier) == {1}
            cancel = Cancellation()
            with pytest.raises(CopyCancelled):
                await bench.storage.restore(tier, Bytes(0, cancel, piece), cancel)
            assert await bench.read(tier) == {1}
        await bench.storage.save(tier, {}, Bytes(2))
        assert await bench.read(tier) == {2}
        assert bench.segments.total_bytes == bench.storage.stored_bytes[Tier.MEMORY]


@pytest.mark.parametrize("tier", TIERS)
@virtual
async def test_cancelled_move_leaves_the_copy_where_it_is(
    clock: Clock, random: Random, tmp_path: Path, tier: Tier
) -> None:
    (other,) = set(TIERS) - {tier}
    async with open_bench(clock, random, tmp_path) as bench:
        await bench.storage.save(tier, {}, Bytes(1))
        cancel = Cancellation()
        cancel.request()
        with pytest.raises(CopyCancelled):
            await bench.storage.move(tier, other, cancel)
        assert bench.storage.stored_bytes[other] == 0 and await bench.read(tier) == {1}
        await bench.storage.move(tier, other)
        assert bench.storage.stored_bytes[tier] == 0 and await bench.read(other) == {1}


@virtual
async def test_next_copy_in_memory_reuses_the_mapped_pages(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    async with open_bench(clock, random, tmp_path) as bench:
        inodes = []
        for value in (1, 2, 3, 4):
            await bench.storage.save(Tier.MEMORY, {"value": value}, Bytes(value))
            assert await bench.read(Tier.MEMORY) == {value}
            inodes.append(list(bench.storage._mapped)[-1])
        assert inodes[:2] == inodes[2:] and len(set(inodes)) == 2
        await bench.storage.drop(Tier.MEMORY)
        assert bench.segments.total_bytes == 0 and bench.segments.unused_bytes > 2 * BYTES


@virtual
async def test_copy_without_room_beside_the_earlier_one_is_rejected(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    async with open_bench(clock, random, tmp_path, budget=BYTES * 3 // 2) as bench:
        await bench.storage.save(Tier.MEMORY, {}, Bytes(1))
        with pytest.raises(StorageFull):
            await bench.storage.save(Tier.MEMORY, {}, Bytes(2))
        assert await bench.read(Tier.MEMORY) == {1}
        await bench.storage.drop(Tier.MEMORY)
        await bench.storage.save(Tier.MEMORY, {}, Bytes(2))
        assert await bench.read(Tier.MEMORY) == {2}


@virtual
async def test_copies_of_an_earlier_version_are_removed_by_name(
    clock: Clock, random: Random, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_bench(clock, random, tmp_path) as bench:
        path = make_offload_path(tmp_path, PROCESS)
        path.write_bytes(OLD_MAGIC + bytes(1000))
        record = OffloadStorage(bench.storage._mesh, WORKER, str(tmp_path))
        with pytest.raises(CorruptData, match="an earlier version of MeshRL"):
            await record.restore(Tier.DISK, Bytes(0))
        path.write_bytes(OLD_MAGIC + bytes(1000))
        assert await record.find_copies() == [] and not path.exists()
        # earlier tests of the process choose the stream
        assert "an earlier version of MeshRL has written it" in "".join(capsys.readouterr())


@virtual
async def test_segment_is_unpinned_when_another_process_needs_its_memory(
    clock: Clock, random: Random, tmp_path: Path
) -> None:
    driver = RecordedDriver()
    tensors = {"a": torch.zeros(BYTES, dtype=torch.uint8)}
    pinned = TensorStorages(tensors, device_copies=DeviceCopies(driver))
    async with open_bench(clock, random, tmp_path, budget=BYTES + BYTES // 2) as bench:
        await bench.storage.save(Tier.MEMORY, {}, pinned)
        await bench.storage.drop(Tier.MEMORY)
        await bench.storage.save(Tier.MEMORY, {}, pinned)
        await bench.storage.drop(Tier.MEMORY)
        assert driver.calls == ["pin"], "its own next copy reuses the memory"
        await bench.other.save(Tier.MEMORY, {}, Bytes(1))
        assert driver.calls == ["pin", "unpin"] and not driver.pinned
        assert bench.segments.unused_bytes == 0
