"""Gradient transfer of rank 0 to hybrids: a file on its own host, bulk rows elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshrl.common.api.ranks import AddGradient
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage, NotFound, PeerLost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.services.trainer.compute.gradient_transfer import (
    PIECE_BYTES,
    GradientOutbox,
    fetch_gradient,
    make_hybrid_name,
    map_gradient_file,
)
from meshrl.services.trainer.gang.rank_gradient_transfer import RankGradientTransfer
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.meshes import on_sockets

JOB = "job"
CORE = f"trainer/{JOB}"
RANKS = 4  # the last two on another host
SIZE = PIECE_BYTES // 4 + 1000  # number of rank 2's rows: two pieces; rank 3 has none


def get_rows(whole: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    return np.array(whole[1000:] if rank == 2 else whole[:0])


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.rotating(3)
async def test_each_rank_gets_its_rows_and_no_file_remains(tmp_path: Path) -> None:
    clock = SystemClock()
    state = open_simulated_state(clock)

    def mesh(name: str, host: str) -> Mesh:
        root = tmp_path / host
        settings = MeshSettings(redis_url=state.url, run_root=str(root), host=host)
        return on_sockets(name, state, clock, settings=settings)

    core, remote = mesh(CORE, "here"), mesh("rank/job/2", "there")
    await core.join(None)
    gradient_transfer = RankGradientTransfer(core, JOB, RANKS, tmp_path / "here/mesh/gangs")
    await gradient_transfer.reset({2, 3})
    bulk = BulkClient(remote)

    async def collect_rows(order: AddGradient) -> NDArray[np.float32]:
        return await fetch_gradient(
            remote, bulk, CORE, order.chunks, order.element_count, order.bulk_address
        )

    for generation in (1, 2):
        whole = np.random.default_rng(generation).random(SIZE + 1000, np.float32)
        async with gradient_transfer.transfer(generation, 0, whole, get_rows) as orders:
            local, second, third = orders
            assert np.array_equal(map_gradient_file(local.path, local.element_count), whole)
            assert len(second.chunks) == 2 and not second.path
            assert (await collect_rows(second)).tobytes() == get_rows(whole, 2).tobytes()
            assert (await collect_rows(third)).size == 0
        with pytest.raises(NotFound):
            await collect_rows(second)
        assert files_below(tmp_path) == []
    await remote.leave()
    await core.leave()
    await state.close()


GANG = "g1"


class TransferPair:
    def __init__(self, core: Mesh, hybrid: Mesh, outbox: GradientOutbox) -> None:
        self.core, self.hybrid, self.outbox = core, hybrid, outbox

    async def collected(self, pieces: list[str], size: int = SIZE) -> torch.Tensor:
        found = await fetch_gradient(
            self.core, BulkClient(self.core), make_hybrid_name(GANG), pieces, size
        )
        return torch.from_numpy(found)


@pytest.fixture(params=["here", "there"])
async def transfer(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[TransferPair]:
    clock, host = SystemClock(), SystemHost()
    state = open_simulated_state(clock)

    def mesh(name: str, host_name: str) -> Mesh:
        settings = MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=host_name)
        return on_sockets(name, state, clock, host=host, settings=settings)

    core, hybrid = mesh("trainer/job", "here"), mesh(make_hybrid_name(GANG), request.param)
    outbox = GradientOutbox(hybrid, GANG)
    await core.join(None)
    await hybrid.join(None, bulk_address=outbox.address)
    yield TransferPair(core, hybrid, outbox)
    outbox.close()
    await hybrid.leave()
    await core.leave()
    await state.close()


async def test_core_gets_a_writable_copy_of_the_hybrids_gradient(transfer: TransferPair) -> None:
    gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    pieces = await transfer.outbox.put(gradient)
    assert len(pieces) == 2
    found = await transfer.collected(pieces)
    assert torch.equal(found, gradient)
    found.add_(1.0)


async def test_gradient_replaces_the_previous_one(transfer: TransferPair) -> None:
    before = await transfer.outbox.put(torch.zeros(10))
    after = await transfer.outbox.put(torch.ones(10))
    with pytest.raises(NotFound):
        await transfer.collected(before, 10)
    assert torch.equal(await transfer.collected(after, 10), torch.ones(10))


@pytest.mark.parametrize("size", [9, 11, SIZE])
async def test_gradient_of_another_length_is_a_bad_message(
    transfer: TransferPair, size: int
) -> None:
    pieces = await transfer.outbox.put(torch.ones(10))
    with pytest.raises(BadMessage, match=f"a gradient of {size} numbers"):
        await transfer.collected(pieces, size)


async def test_departed_hybrid_is_a_lost_peer(transfer: TransferPair) -> None:
    pieces = await transfer.outbox.put(torch.ones(10))
    await transfer.hybrid.leave()
    with pytest.raises(PeerLost, match="exited with its gradient"):
        await transfer.collected(pieces, 10)
