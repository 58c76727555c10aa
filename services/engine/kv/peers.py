"""Chunks of other hosts, which their engines list and serve over the bulk port.

A thread of its own uses this module and waits here for the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshrl.common.api.engine import ChunkLookup, Engine
from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.services.engine.kv.chunk_files import HEADER_BYTES, NAME_BYTES, verify_chunk
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.loader import LoadedChunk

T = TypeVar("T")

MIN_TOKENS = 1024  # missing tokens from which on other hosts are queried
QUERY_TIMEOUT_S = 1.0  # for a host to list its chunks
CHUNK_TIMEOUT_S = 10.0  # for one chunk
LOOP_TIMEOUT_S = CHUNK_TIMEOUT_S + 5.0  # for a call that runs on the loop
REFRESH_S = 2.0  # interval of polls for the job's engines
# After this many empty answers in a row, only one look-up in QUERY_EVERY sends a query.
MAX_EMPTY_ANSWERS = 32
QUERY_EVERY = 16


class PeerEngines:
    """Engines of one job on other hosts; see `ChunkSource`."""

    name = "peers"

    def __init__(self, mesh: Mesh, job: str, loop: asyncio.AbstractEventLoop) -> None:
        self._mesh, self._job, self._loop = mesh, job, loop
        self._client = BulkClient(mesh)
        self._refreshed_s = -REFRESH_S
        self._hosts: list[RegistryEntry] = []
        self._locations: dict[str, RegistryEntry] = {}  # engines that have a chunk, by its name
        self._empty_answers = self._look_ups = 0

    def look_up(self, domain: str, names: Mapping[int, str]) -> Collection[int]:
        self._look_ups += 1
        if self._empty_answers >= MAX_EMPTY_ANSWERS and self._look_ups % QUERY_EVERY:
            return ()
        found = self._run_on_loop(self._query_hosts(domain, list(names.values())))
        self._empty_answers = 0 if found else self._empty_answers + bool(self._hosts)
        self._locations = {**dict(list(self._locations.items())[-8192:]), **(found or {})}
        return [start for start, name in names.items() if name in (found or {})]

    async def _query_hosts(self, domain: str, names: Sequence[str]) -> dict[str, RegistryEntry]:
        now_s = self._mesh.clock.monotonic()
        if now_s - self._refreshed_s > REFRESH_S:
            self._refreshed_s = now_s
            entries = await registry.list_entries(self._mesh.state, "engine")
            self._hosts = list(
                {entry.host: entry for entry in entries if self._is_peer(entry)}.values()
            )
        packed = np.frombuffer(bytes.fromhex("".join(names)), np.uint8)
        lookup = ChunkLookup(domain, packed)
        found: dict[str, RegistryEntry] = {}

        async def ask(entry: RegistryEntry) -> None:
            try:
                ref = self._mesh.ref(entry.name)
                answer = await ref.call(Engine.look_up_chunks, lookup, deadline_s=QUERY_TIMEOUT_S)
            except MeshError:
                return
            there = answer.found.tolist()
            found.update({name: entry for name, has in zip(names, there, strict=False) if has})

        await asyncio.gather(*map(ask, self._hosts))
        return found

    def _is_peer(self, entry: RegistryEntry) -> bool:
        other = entry.host != self._mesh.settings.host
        return other and entry.alive and bool(entry.bulk) and entry.stats.get("job") == self._job

    def read(self, domain: str, name: str) -> LoadedChunk | None:
        """Read and verify a chunk of another host; return None if it is unavailable."""
        entry = self._locations.get(name)
        if entry is None:
            return None
        content = self._run_on_loop(
            self._client.fetch_unchecked(entry, name, deadline_s=CHUNK_TIMEOUT_S)
        )
        if content is None or len(content) <= HEADER_BYTES:
            return None
        body = np.frombuffer(content, np.uint8)[HEADER_BYTES:]
        head = verify_chunk(name, content[:HEADER_BYTES], body)
        if head is None:
            self._mesh.telemetry.count("kv_damaged")
            return None
        return self.name, head, body

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run `work` on the loop and return its result; None if it fails or times out."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(LOOP_TIMEOUT_S)
        # RuntimeError: the loop is closing
        except (MeshError, TimeoutError, CancelledError, RuntimeError):
            future.cancel()
            return None


class TierChunkStore(ChunkStore):
    """KV tiers of a host as a bulk port serves them, by the names of chunks.

    The names are no digests of the content; the receiver verifies each chunk.
    """

    def __init__(self, tiers: Sequence[KVTier]) -> None:
        super().__init__(tiers[0].files.directory)
        self._tiers = tiers

    def chunk_path(self, digest: str) -> Path:
        missing = super().chunk_path(digest)
        for shelf in self._tiers:
            for path in shelf.files.directory.glob(f"*/{digest[:2]}/{digest}"):
                return path
        return missing


def decode_chunk_names(request: ChunkLookup) -> list[str]:
    text = request.chunk_names.tobytes().hex()
    return [text[at : at + 2 * NAME_BYTES] for at in range(0, len(text), 2 * NAME_BYTES)]
