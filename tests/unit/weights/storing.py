"""A weight store, and a trainer that speaks to it over sockets, as from another host."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.weights.bulk.port import BulkClient, ChunkStore


class Store:
    def __init__(self, mesh: Mesh, chunks: ChunkStore) -> None:
        self.mesh, self.chunks = mesh, chunks
        self.bulk = BulkClient(mesh)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.chunks.directory.glob("??/*"))
