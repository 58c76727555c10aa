"""Fixture of a weight store that closes when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.port import BulkServer, ChunkStore
from meshrl.services.weights.run_host_files import SharedTasks
from meshrl.services.weights.store import WeightStore
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.meshes import on_sockets
from tests.unit.weights.store_processes import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    clock, host = SystemClock(), SystemHost()
    state = open_simulated_state(clock)

    def mesh(name: str, host_name: str) -> Mesh:
        settings = MeshSettings(redis_url=state.url, run_root=str(tmp_path), host=host_name)
        return on_sockets(name, state, clock, host=host, settings=settings)

    (tmp_path / "store").mkdir()
    chunks = ChunkStore(tmp_path / "store")
    store_mesh, client_mesh = mesh(STORE_NAME, "there"), mesh("trainer", "here")
    authenticator = InProcessAuthenticator()
    bulk = BulkServer(chunks, host, "tcp://127.0.0.1:*", authenticator=authenticator)
    # Slow requests get the answer to retry.
    service = WeightStore(store_mesh, chunks, SharedTasks(store_mesh, answer_s=0.0))
    await store_mesh.join(service, bulk_address=bulk.address)
    await client_mesh.join(None)
    yield Store(client_mesh, chunks)
    await client_mesh.leave()
    await store_mesh.leave()
    bulk.close()
    await state.close()
