"""Hosts that fetch from a weight store over sockets and serve the chunks that they have."""

from __future__ import annotations

import os
from pathlib import Path

from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.digest import compute_digest
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.bulk.port import BulkClient, BulkServer, ChunkStore, serve_chunks
from meshrl.common.weights.pull.chunk_pull import MissingChunk, PullResult, pull_chunks
from meshrl.common.weights.store import chunk_cache
from meshrl.services.weights.store import WeightStore
from tests.unit.weights.store_processes import ProcessesOnHosts

CHUNK = 100_000


class Hosts(ProcessesOnHosts):
    """Hosts with a chunk server each, processes that fetch, and a weight store."""

    def __init__(self, root: Path, state: StateClient) -> None:
        super().__init__(root, state)
        self.servers: dict[str, BulkServer] = {}  # by host
        self.clients: list[BulkClient] = []

    async def start_store(self, *, bulk_address: str = "", **more: int) -> Mesh:
        mesh = self.process(STORE_NAME, "head", **more)
        server = self.servers["head"] = serve_chunks(mesh, self.store)
        await mesh.join(WeightStore(mesh, self.store), bulk_address=bulk_address or server.address)
        return mesh

    async def start_agent(self, host: str, *, bulk_address: str = "", **more: int) -> Mesh:
        mesh = self.process(f"node/{host}", host, **more)
        server = chunk_cache.serve_cache(mesh)
        assert server is not None
        self.servers[host] = server
        await mesh.join(None, bulk_address=bulk_address or server.address)
        return mesh

    async def start_fetcher(self, host: str, name: str = "", **more: int) -> Fetcher:
        mesh = self.process(name or f"engine/{host}", host, **more)
        await mesh.join(None)
        fetcher = Fetcher(mesh)
        self.clients.append(fetcher.bulk)
        return fetcher

    def store_chunks(self, chunks: int, size: int = CHUNK) -> list[MissingChunk]:
        """Store chunks of random bytes and return them."""
        return [MissingChunk(self.store.write(os.urandom(size)), size) for _ in range(chunks)]

    def cache(self, host: str) -> ChunkStore:
        return ChunkStore(self.root / host / "chunks")

    def has_valid_chunks(self, host: str, chunks: list[MissingChunk]) -> bool:
        """Return whether a host has all of these chunks, each with its digest."""
        paths = [self.cache(host).chunk_path(one.digest) for one in chunks]
        return all(compute_digest(path.read_bytes()) == path.name for path in paths)

    @property
    def store_sent_bytes(self) -> int:
        """Bytes that the store has sent."""
        return self.servers["head"].sent_bytes

    async def leave(self) -> None:
        for client in self.clients:
            client._connection_pool.close_idle(0.0)
        for mesh in reversed(self.meshes):
            await mesh.leave()
        for server in self.servers.values():
            server.close()


class Fetcher:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.bulk = mesh, BulkClient(mesh)

    @property
    def chunks(self) -> ChunkStore:
        cache = chunk_cache.open_cache(self.mesh)
        assert cache is not None
        return cache

    async def pull(self, chunks: list[MissingChunk]) -> PullResult:
        return await pull_chunks(self.mesh, self.bulk, chunks, self.chunks, job="j")

    def count(self, name: str) -> float:
        return self.mesh.telemetry.counters.get(f"chunks_{name}", 0)
