"""A gradient that a hybrid lends: by its bulk port to another host, by its files on the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage, NotFound, PeerLost
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.services.trainer.compute.gradient_transfer import (
    PIECE_BYTES,
    Outbox,
    collect,
    hybrid_name,
)
from meshrl.sim.redis.state import simulated_state
from tests.meshes import on_sockets

GANG = "g1"
SIZE = PIECE_BYTES // 4 + 1000  # numbers: two pieces


class Lent:
    def __init__(self, core: Mesh, hybrid: Mesh, outbox: Outbox) -> None:
        self.core, self.hybrid, self.outbox = core, hybrid, outbox

    async def collected(self, pieces: list[str], size: int = SIZE) -> torch.Tensor:
        found = await collect(self.core, BulkClient(self.core), hybrid_name(GANG), pieces, size)
        return torch.from_numpy(found)


@pytest.fixture(params=["here", "there"])
async def lent(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Lent]:
    clock, host = SystemClock(), SystemHost()
    state = simulated_state(clock)

    def mesh(name: str, where: str) -> Mesh:
        settings = MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=where)
        return on_sockets(name, state, clock, host=host, settings=settings)

    core, hybrid = mesh("trainer/job", "here"), mesh(hybrid_name(GANG), request.param)
    outbox = Outbox(hybrid, GANG)
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
