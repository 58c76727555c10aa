"""Gradient transfer of a hybrid to ranks on its host and on others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage, NotFound, PeerLost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.services.trainer.compute.gradient_transfer import (
    PIECE_NUMBERS,
    GradientOutbox,
    fetch_gradient,
    make_hybrid_name,
)
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.meshes import on_sockets

SIZE = PIECE_NUMBERS + 1000  # two pieces
GANG = "g1"


def list_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


class TransferPair:
    def __init__(self, core: Mesh, hybrid: Mesh, outbox: GradientOutbox) -> None:
        self.core, self.hybrid, self.outbox = core, hybrid, outbox

    async def put(self, gradient: torch.Tensor) -> list[str]:
        [pieces] = await self.outbox.put(gradient, [np.array([[0, len(gradient)]], np.int64)])
        return pieces

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
    gradient = torch.arange(SIZE, dtype=torch.float32)
    pieces = await transfer.put(gradient)
    assert len(pieces) == 2
    found = await transfer.collected(pieces)
    assert torch.equal(found, gradient)
    found.add_(1.0)


async def test_gradient_replaces_the_previous_one(transfer: TransferPair) -> None:
    before = await transfer.put(torch.zeros(10))
    after = await transfer.put(torch.ones(10))
    with pytest.raises(NotFound):
        await transfer.collected(before, 10)
    assert torch.equal(await transfer.collected(after, 10), torch.ones(10))


@pytest.mark.parametrize("size", [9, 11, SIZE])
async def test_gradient_of_another_length_is_a_bad_message(
    transfer: TransferPair, size: int
) -> None:
    pieces = await transfer.put(torch.ones(10))
    with pytest.raises(BadMessage, match=f"for (a gradient of )?{size} numbers"):
        await transfer.collected(pieces, size)


async def test_each_rank_gets_its_rows_and_no_file_remains(
    transfer: TransferPair, tmp_path: Path
) -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(2))
    ranges = [[[0, 10], [90, 100]], [[10, 10]], [[10, 90]]]
    pieces = await transfer.outbox.put(gradient, [np.array(own, np.int64) for own in ranges])
    for own, some in zip(ranges, pieces, strict=True):
        expected = torch.cat([gradient[start:end] for start, end in own])
        assert torch.equal(await transfer.collected(some, len(expected)), expected)
    assert transfer.outbox.staged_bytes == 400
    await transfer.outbox.clear()
    assert not list_files(tmp_path / "mesh" / "lent")


async def test_departed_hybrid_is_a_lost_peer(transfer: TransferPair) -> None:
    pieces = await transfer.put(torch.ones(10))
    await transfer.hybrid.leave()
    with pytest.raises(PeerLost, match="exited with its gradient"):
        await transfer.collected(pieces, 10)
