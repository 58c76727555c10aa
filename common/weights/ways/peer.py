"""Pulled: made of a version that the host has where a delta is cheaper, else fetched from whoever
has it. Nobody waits for anybody, so it is the plainest way.
"""

from __future__ import annotations

from common.mesh.runtime.mesh import Mesh
from common.weights.bulk.port import BulkClient
from common.weights.chunks.chunks import ChunkStore
from common.weights.delta.receiving import from_deltas
from common.weights.pull.pull import Wanted, pull
from common.weights.ways.base import WantedVersion

LEAST_BYTES = 8 << 20  # below, what is measured is the time of a few calls


class PullPath:
    """A way; see `Way`."""

    name = "pull"

    def __init__(self, mesh: Mesh, bulk: BulkClient) -> None:
        self._mesh, self._bulk = mesh, bulk
        self._rate: float | None = None  # bytes a second that came, when much did last

    async def receive(self, version: WantedVersion, into: ChunkStore) -> None:
        """Makes what it can of deltas, and fetches the rest. NotFound, Damaged, StorageFull."""
        about, rate = (self._mesh, self._bulk), self._rate
        missing = dict(version.lacking)
        made = await from_deltas(
            *about,
            version.manifest,
            missing,
            into,
            needed=version.needed,
            job=version.job,
            rate=rate,
        )
        wanted = [Wanted(digest, size) for digest, size in missing.items() if digest not in made]
        pulled = await pull(*about, wanted, into, made=made, needed=version.needed, job=version.job)
        if pulled.bytes >= LEAST_BYTES and pulled.seconds:
            self._rate = pulled.bytes / pulled.seconds
