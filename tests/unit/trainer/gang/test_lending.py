"""What rank 0 lends of a hybrid's gradient: a file on its host, rows by bulk elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from meshrl.common.api.ranks import LentGradient
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.services.trainer.compute.gradient_transfer import PIECE_BYTES, collect, read
from meshrl.services.trainer.gang.lending import Lending
from meshrl.sim.redis.state import simulated_state
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
    state = simulated_state(clock)

    def mesh(name: str, host: str) -> Mesh:
        root = tmp_path / host
        settings = MeshSettings(redis_url=state.url, run_root=str(root), host=host)
        return on_sockets(name, state, clock, settings=settings)

    core, far = mesh(CORE, "here"), mesh("rank/job/2", "there")
    await core.join(None)
    lending = Lending(core, JOB, RANKS, tmp_path / "here/mesh/gangs")
    await lending.begin({2, 3})
    bulk = BulkClient(far)

    async def collected(order: LentGradient) -> NDArray[np.float32]:
        return await collect(far, bulk, CORE, order.pieces, order.size, order.bulk)

    for generation in (1, 2):
        whole = np.random.default_rng(generation).random(SIZE + 1000, np.float32)
        async with lending.lent(generation, 0, whole, rows) as orders:
            near, second, third = orders
            assert np.array_equal(read(near.path, near.size), whole)
            assert len(second.pieces) == 2 and not second.path
            assert (await collected(second)).tobytes() == rows(whole, 2).tobytes()
            assert (await collected(third)).size == 0
        with pytest.raises(NotFound):
            await collected(second)
        assert files_below(tmp_path) == []
    await far.leave()
    await core.leave()
    await state.close()
