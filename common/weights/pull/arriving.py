"""Chunks on their way to a directory of this host: each from one source at a time, and from another
one where the last has left off.
"""

from __future__ import annotations

from meshrl.common.api.weights import STORE, Examine, Weights
from meshrl.common.base.errors import Damaged, PeerLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.chunks.partial import Partial

STALL_S = 2.0  # without a byte: another source is asked; within a host's lease, which lasts longer
ENTRY_S = 5.0  # that a source's entry is believed: where it does not hold, a transfer fails
COMMIT_S = 60.0  # for a disk to name a file


class Arriving:
    """The chunks of one pull. To leave it is to forget what has not come as a whole."""

    def __init__(self, mesh: Mesh, bulk: BulkClient, into: ChunkStore, job: str) -> None:
        self._mesh, self._bulk, self._into, self._job = mesh, bulk, into, job
        self._partial: dict[str, Partial] = {}
        self._from: dict[str, set[str]] = {}  # sources by chunk, while it is not whole
        self._entries: dict[str, tuple[float, registry.Entry]] = {}

    def position(self, chunk: str) -> int:
        """How many bytes of a chunk have come."""
        return self._partial[chunk].position if chunk in self._partial else 0

    async def arrive(self, chunk: str, size: int, source: str) -> bool:
        """Returns once a chunk of so many bytes is there as a whole: False, another process of this
        host has fetched it before. NotFound: the source has not got it; Damaged: what it has is not
        the chunk, and the source is to blame; PeerLost, DeadlineExceeded: go on with another
        source; StorageFull.
        """
        if await self._mesh.host.run_blocking(self._into.use, chunk, deadline_s=COMMIT_S):
            return False
        now = self._mesh.clock.monotonic()
        read_at, entry = self._entries.get(source, (-ENTRY_S, None))
        if entry is None or now - read_at > ENTRY_S:
            entry = await registry.lookup(self._mesh.state, source)
            if entry is None or not entry.alive or not entry.bulk:
                raise PeerLost("it has no live lease", where=source)
            self._entries[source] = now, entry
        partial = self._partial.get(chunk)
        if partial is None:
            partial = Partial.of_chunk(self._into, chunk, durable=False)
            self._partial[chunk] = partial
        sources = self._from.setdefault(chunk, set())
        sources.add(source)
        try:
            await self._bulk.arrive(entry, partial, size, stall_s=STALL_S)
        except Damaged:  # it has another size there: what others sent may be right
            await self._blame(chunk, source, alone=True)
        except PeerLost:
            self._entries.pop(source, None)
            raise
        if not partial.right:
            partial.begin_again()
            self._from[chunk] = set()
            await self._blame(chunk, source, alone=sources == {source})
        await self._mesh.host.run_blocking(partial.commit, deadline_s=COMMIT_S)
        self.forget(chunk)
        return True

    def forget(self, chunk: str) -> None:
        """Nobody waits for a chunk any more."""
        self._from.pop(chunk, None)
        if (partial := self._partial.pop(chunk, None)) is not None:
            partial.discard()

    def close(self) -> None:
        """Forgets all."""
        for chunk in list(self._partial):
            self.forget(chunk)

    async def _blame(self, chunk: str, source: str, alone: bool) -> None:
        """Damaged where the source is to blame; PeerLost where it may be another, or the way."""
        changed = f"chunk {chunk} arrived changed"
        if not alone:
            raise PeerLost(changed, where=source)
        if source == STORE:
            asked = Examine(chunk, "weights", self._job)
            if await self._mesh.ref(STORE).call(Weights.examine, asked):
                raise PeerLost(changed, where=source)
        self._mesh.telemetry.count("chunks_damaged")
        raise Damaged(changed, where=source)
