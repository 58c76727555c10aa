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
SIZE = PIECE_BYTES // 4 + 1000  # numbers of rank 2's rows: two pieces; rank 3 has none


def rows(whole: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    return np.array(whole[1000:] if rank == 2 else whole[:0])


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.rotating(3)
async def test_each_rank_gets_its_rows_and_nothing_stays(tmp_path: Path) -> None:
    clock = SystemClock()
    state = open_simulated_state(clock)

    def mesh(name: str, host: str) -> Mesh:
        root = tmp_path / host
        settings = MeshSettings(redis_url=state.url, run_root=str(root), host=host)
        return on_sockets(name, state, clock, settings=settings)

    core, far = mesh(CORE, "here"), mesh("rank/job/2", "there")
    await core.join(None)
    lending = RankGradientTransfer(core, JOB, RANKS, tmp_path / "here/mesh/gangs")
    await lending.reset({2, 3})
    bulk = BulkClient(far)

    async def collected(order: AddGradient) -> NDArray[np.float32]:
        return await fetch_gradient(
            far, bulk, CORE, order.chunks, order.element_count, order.bulk_address
        )

    for generation in (1, 2):
        whole = np.random.default_rng(generation).random(SIZE + 1000, np.float32)
        async with lending.transfer(generation, 0, whole, rows) as orders:
            near, second, third = orders
            assert np.array_equal(map_gradient_file(near.path, near.element_count), whole)
            assert len(second.chunks) == 2 and not second.path
            assert (await collected(second)).tobytes() == rows(whole, 2).tobytes()
            assert (await collected(third)).size == 0
        with pytest.raises(NotFound):
            await collected(second)
        assert files_below(tmp_path) == []
    await far.leave()
    await core.leave()
    await state.close()


GANG = "g1"


class Lent:
    def __init__(self, core: Mesh, hybrid: Mesh, outbox: GradientOutbox) -> None:
        self.core, self.hybrid, self.outbox = core, hybrid, outbox

    async def collected(self, pieces: list[str], size: int = SIZE) -> torch.Tensor:
        found = await fetch_gradient(
            self.core, BulkClient(self.core), make_hybrid_name(GANG), pieces, size
        )
        return torch.from_numpy(found)


@pytest.fixture(params=["here", "there"])
async def lent(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Lent]:
    clock, host = SystemClock(), SystemHost()
    state = open_simulated_state(clock)

    def mesh(name: str, where: str) -> Mesh:
        settings = MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=where)
        return on_sockets(name, state, clock, host=host, settings=settings)

    core, hybrid = mesh("trainer/job", "here"), mesh(make_hybrid_name(GANG), request.param)
    outbox = GradientOutbox(hybrid, GANG)
    await core.join(None)
    await hybrid.join(None, bulk_address=outbox.address)
    yield Lent(core, hybrid, outbox)
    outbox.close()
    await hybrid.leave()
    await core.leave()
    await state.close()


async def test_the_core_gets_what_the_hybrid_put_and_may_change_it(lent: Lent) -> None:
    gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    pieces = await lent.outbox.put(gradient)
    assert len(pieces) == 2
    found = await lent.collected(pieces)
    assert torch.equal(found, gradient)
    found.add_(1.0)


async def test_a_gradient_takes_the_place_of_the_one_before(lent: Lent) -> None:
    before = await lent.outbox.put(torch.zeros(10))
    after = await lent.outbox.put(torch.ones(10))
    with pytest.raises(NotFound):
        await lent.collected(before, 10)
    assert torch.equal(await lent.collected(after, 10), torch.ones(10))


@pytest.mark.parametrize("size", [9, 11, SIZE])
async def test_one_of_another_length_is_a_bad_message(lent: Lent, size: int) -> None:
    pieces = await lent.outbox.put(torch.ones(10))
    with pytest.raises(BadMessage, match=f"a gradient of {size} numbers"):
        await lent.collected(pieces, size)


async def test_a_hybrid_that_has_gone_is_a_lost_peer(lent: Lent) -> None:
    pieces = await lent.outbox.put(torch.ones(10))
    await lent.hybrid.leave()
    with pytest.raises(PeerLost, match="gone with its gradient"):
        await lent.collected(pieces, 10)
