"""Chunks of other hosts: their engines say what lies on their shelves, and give it over the bulk
port.

Used by a thread of its own, which waits here for what the loop does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshrl.common.api.engine import Engine, Stored
from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.registry import Entry
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.services.engine.kv.chunk_files import HEAD_BYTES, NAME_BYTES, unpacked
from meshrl.services.engine.kv.loader import Came
from meshrl.services.engine.kv.shelf import KVTier

T = TypeVar("T")

FROM_TOKENS = 1024  # that this host lacks, before others are asked
ASK_S = 1.0  # for a host to say what it has
CHUNK_S = 10.0  # for one chunk
WAIT_S = CHUNK_S + 5.0  # for the loop to do what it was asked
LISTED_S = 2.0  # between two looks at who is there
FRUITLESS = 32  # answers in a row that nothing was there, after which only one in so many asks
SELDOM = 16


class Peers:
    """The engines of one job on other hosts; see `Source`."""

    name = "peers"

    def __init__(self, mesh: Mesh, job: str, loop: asyncio.AbstractEventLoop) -> None:
        self._mesh, self._job, self._loop = mesh, job, loop
        self._client = BulkClient(mesh)
        self._listed_s = -LISTED_S
        self._hosts: list[Entry] = []
        self._where: dict[str, Entry] = {}  # chunks that were found, by name
        self._fruitless = self._passed = 0

    def look(self, domain: str, names: Mapping[int, str]) -> Collection[int]:
        self._passed += 1
        if self._fruitless >= FRUITLESS and self._passed % SELDOM:
            return ()
        found = self._on_loop(self._look(domain, list(names.values())))
        self._fruitless = 0 if found else self._fruitless + bool(self._hosts)
        self._where = {**dict(list(self._where.items())[-8192:]), **(found or {})}
        return [start for start, name in names.items() if name in (found or {})]

    async def _look(self, domain: str, names: Sequence[str]) -> dict[str, Entry]:
        now_s = self._mesh.clock.monotonic()
        if now_s - self._listed_s > LISTED_S:
            self._listed_s = now_s
            entries = await registry.entries(self._mesh.state, "engine")
            self._hosts = list(
                {entry.host: entry for entry in entries if self._serves(entry)}.values()
            )
        packed = np.frombuffer(bytes.fromhex("".join(names)), np.uint8)
        asked = Stored(domain, packed)
        found: dict[str, Entry] = {}

        async def ask(entry: Entry) -> None:
            try:
                ref = self._mesh.ref(entry.name)
                answer = await ref.call(Engine.stored, asked, deadline_s=ASK_S)
            except MeshError:
                return
            there = answer.there.tolist()
            found.update({name: entry for name, has in zip(names, there, strict=False) if has})

        await asyncio.gather(*map(ask, self._hosts))
        return found

    def _serves(self, entry: Entry) -> bool:
        other = entry.host != self._mesh.settings.host
        return other and entry.alive and bool(entry.bulk) and entry.stats.get("job") == self._job

    def read(self, domain: str, name: str) -> Came | None:
        """A chunk of another host, checked; None: it cannot be had."""
        entry = self._where.get(name)
        if entry is None:
            return None
        content = self._on_loop(self._client.lent(entry, name, deadline_s=CHUNK_S))
        if content is None or len(content) <= HEAD_BYTES:
            return None
        body = np.frombuffer(content, np.uint8)[HEAD_BYTES:]
        head = unpacked(name, content[:HEAD_BYTES], body)
        if head is None:
            self._mesh.telemetry.count("kv_damaged")
            return None
        return self.name, head, body

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of it; None: it failed, or the loop has no time for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(WAIT_S)
        except (MeshError, TimeoutError, CancelledError, RuntimeError):  # or it is closing
            future.cancel()
            return None


class ShelvedChunks(ChunkStore):
    """The shelves of a host as a bulk port serves them: by the names of chunks, which are no
    digests; whoever asks checks what comes.
    """

    def __init__(self, shelves: Sequence[KVTier]) -> None:
        super().__init__(shelves[0].files.directory)
        self._shelves = shelves

    def path(self, digest: str) -> Path:
        missing = super().path(digest)
        for shelf in self._shelves:
            for path in shelf.files.directory.glob(f"*/{digest[:2]}/{digest}"):
                return path
        return missing


def names_in(asked: Stored) -> list[str]:
    text = asked.names.tobytes().hex()
    return [text[at : at + 2 * NAME_BYTES] for at in range(0, len(text), 2 * NAME_BYTES)]
