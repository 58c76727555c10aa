"""Weight store and processes of other hosts that use it over sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.bulk.authenticators import InProcessAuthenticator
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.services.weights.store import WeightStore
from tests.meshes import on_sockets
from tests.unit.common.weights.bulk.faulty_proxy import FaultyProxy


class Store:
    def __init__(self, mesh: Mesh, chunks: ChunkStore) -> None:
        self.mesh, self.chunks = mesh, chunks
        self.bulk = BulkClient(mesh)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.chunks.directory.glob("??/*"))


class ProcessesOnHosts:
    """Processes on hosts with a directory each; the host `head` has the weight store."""

    service: WeightStore
    trainer: Mesh
    proxy: FaultyProxy

    def __init__(self, root: Path, state: StateClient) -> None:
        self.root, self.state = root, state
        self.meshes: list[Mesh] = []
        self.store = ChunkStore(root / "head/store")

    def process(self, name: str, host: str, **more: Any) -> Mesh:
        root = str(self.root / host)
        settings = MeshSettings(redis_url=self.state.url, run_root=root, host=host, **more)
        mesh = on_sockets(name, self.state, SystemClock(), settings=settings)
        self.meshes.append(mesh)
        return mesh

    async def receiver(self, name: str, host: str, **more: Any) -> tuple[Mesh, WeightReceiver]:
        mesh = self.process(name, host, **more)
        await mesh.join(None)
        return mesh, WeightReceiver(mesh, BulkClient(mesh))

    @asynccontextmanager
    async def run_store(self, *address: str) -> AsyncIterator[None]:
        """Start the store, which serves other hosts through `proxy`, and a trainer that has joined.
        Args:
            address: the host address that the store publishes, if not its own.
        """
        store_mesh = self.process(STORE_NAME, "head")
        authenticator = InProcessAuthenticator()
        bulk = BulkServer(
            self.store, SystemHost(), "tcp://127.0.0.1:*", *address, authenticator=authenticator
        )
        self.service = WeightStore(store_mesh, self.store)
        with FaultyProxy(
            int(bulk.address.partition("#")[0].rpartition(":")[2]), 1 << 40
        ) as self.proxy:
            await store_mesh.join(self.service, bulk_address=bulk.address)
            self.trainer = self.process("trainer/j", "head")
            await self.trainer.join(None)
            yield
            for mesh in reversed(self.meshes):
                await mesh.leave()
        bulk.close()
        await self.state.close()
