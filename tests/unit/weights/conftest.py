"""A weight store that is gone when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.process.host import SystemHost
from common.random import Random
from common.runtime.mesh import Mesh, MeshSettings
from common.transport.zmq import ZmqTransport
from common.wire.bulk import BulkServer, ChunkStore
from common.wire.weight_store import STORE
from services.weights.store import WeightStore
from sim.state import simulated_state
from tests.unit.weights.storing import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    clock, host = SystemClock(), SystemHost()
    state = simulated_state(clock)

    def mesh(name: str, where: str) -> Mesh:
        return Mesh(
            name=name,
            kind="test",
            state=state,
            transport=ZmqTransport(),
            clock=clock,
            random=Random.system(),
            host=host,
            settings=MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=where),
        )

    (tmp_path / "store").mkdir()
    chunks = ChunkStore(tmp_path / "store")
    serving, asking = mesh(STORE, "there"), mesh("trainer", "here")
    bulk = BulkServer(chunks, host, "tcp://127.0.0.1:*")
    await serving.join(WeightStore(serving, chunks), bulk_address=bulk.address)
    await asking.join(None)
    yield Store(asking, chunks)
    await asking.leave()
    await serving.leave()
    bulk.close()
    await state.close()
