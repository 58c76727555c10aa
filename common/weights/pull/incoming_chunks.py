"""Chunks being fetched to a store of this host, each from one source at a time.

When a source fails, another one continues at the same byte.
"""

from __future__ import annotations

from meshrl.common.api.weights import STORE_NAME, ChunkVerification, Weights
from meshrl.common.base.errors import CorruptData, PeerLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.chunks.partial_file import PartialFile

STALL_TIMEOUT_S = 2.0  # without a byte, then another source continues; shorter than a host's lease
ENTRY_MAX_AGE_S = 5.0  # of a cached registry entry: if it is outdated, a transfer fails
COMMIT_TIMEOUT_S = 60.0  # for a disk to rename a file


class IncomingChunks:
    """Incoming chunks of one pull; `close` discards incomplete ones."""

    def __init__(self, mesh: Mesh, bulk: BulkClient, target_store: ChunkStore, job: str) -> None:
        self._mesh, self._bulk, self._target_store, self._job = mesh, bulk, target_store, job
        self._partial_files: dict[str, PartialFile] = {}
        self._sources_by_chunk: dict[str, set[str]] = {}  # sources by incomplete chunk
        self._entries: dict[str, tuple[float, registry.RegistryEntry]] = {}

    def received_bytes(self, chunk: str) -> int:
        """Return the received bytes of a chunk."""
        return self._partial_files[chunk].received_bytes if chunk in self._partial_files else 0

    async def fetch_from(self, chunk: str, size_bytes: int, source: str) -> bool:
        """Fetch a chunk of `size_bytes` from a source until it is complete.

        Returns:
            False if another process of this host had fetched it before.
        Raises:
            NotFound: The source does not have it.
            CorruptData: The source has corrupt data.
            PeerLost, DeadlineExceeded: Continue with another source.
            StorageFull: The disk is full.
        """
        if await self._mesh.host.run_blocking(
            self._target_store.mark_used, chunk, deadline_s=COMMIT_TIMEOUT_S
        ):
            return False
        now = self._mesh.clock.monotonic()
        read_at, entry = self._entries.get(source, (-ENTRY_MAX_AGE_S, None))
        if entry is None or now - read_at > ENTRY_MAX_AGE_S:
            entry = await registry.lookup(self._mesh.state, source)
            if entry is None or not entry.alive or not entry.bulk:
                raise PeerLost("it has no live lease", where=source)
            self._entries[source] = now, entry
        partial = self._partial_files.get(chunk)
        if partial is None:
            partial = PartialFile.for_chunk(self._target_store, chunk, durable=False)
            self._partial_files[chunk] = partial
        sources = self._sources_by_chunk.setdefault(chunk, set())
        sources.add(source)
        try:
            await self._bulk.fetch_part(entry, partial, size_bytes, stall_s=STALL_TIMEOUT_S)
        except CorruptData:  # its size differs there: bytes of other sources may be valid
            await self._raise_corruption(chunk, source, is_only_source=True)
        except PeerLost:
            self._entries.pop(source, None)
            raise
        if not partial.is_valid:
            partial.reset()
            self._sources_by_chunk[chunk] = set()
            await self._raise_corruption(chunk, source, is_only_source=sources == {source})
        await self._mesh.host.run_blocking(partial.commit, deadline_s=COMMIT_TIMEOUT_S)
        self.discard(chunk)
        return True

    def discard(self, chunk: str) -> None:
        """Discard an incomplete chunk."""
        self._sources_by_chunk.pop(chunk, None)
        if (partial := self._partial_files.pop(chunk, None)) is not None:
            partial.discard()

    def close(self) -> None:
        """Discard all incomplete chunks."""
        for chunk in list(self._partial_files):
            self.discard(chunk)

    async def _raise_corruption(self, chunk: str, source: str, is_only_source: bool) -> None:
        """Raise CorruptData if the source's data is corrupt, PeerLost if another source or transit
        may be.
        """
        changed = f"chunk {chunk} arrived corrupt"
        if not is_only_source:
            raise PeerLost(changed, where=source)
        if source == STORE_NAME:
            verification = ChunkVerification(chunk, "weights", self._job)
            if await self._mesh.ref(STORE_NAME).call(Weights.verify_chunk, verification):
                raise PeerLost(changed, where=source)
        self._mesh.telemetry.count("chunks_damaged")
        raise CorruptData(changed, where=source)
