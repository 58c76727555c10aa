"""A job's core that broadcasts, and hosts that receive, over real sockets, each with its files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from meshrl.common.api.trainer import BroadcastPlan, BroadcastRequest, Trainer
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.store import chunk_cache
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.transports.broadcaster import Broadcaster
from meshrl.common.weights.transports.collective import CollectiveTransport
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.meshes import on_sockets
from tests.recording_actors import make_recording_actor

SIZES = 300_000, 1, 70_000, 1 << 20, 12_345  # bytes of the chunks
JOB, MANIFEST = "job", "5" * 32


class Core(type(make_recording_actor("trainer", []))):  # type: ignore[misc]
    """Of a trainer, what receivers ask of it; it has nothing else to say."""

    def __init__(self, broadcasts: Broadcaster) -> None:
        self.broadcasts, self.asked = broadcasts, 0

    @call(Trainer.join_broadcast)
    async def join_broadcast(self, request: BroadcastRequest) -> BroadcastPlan:
        self.asked += 1
        return await self.broadcasts.join_broadcast(request)


class Bench:
    """Hosts by name; the core's own chunks are those of the version."""

    def __init__(self, root: Path, left: AsyncExitStack, sizes: Sequence[int]) -> None:
        self.root, self._left = root, left
        self.clock = SystemClock()
        self.state: StateClient = open_simulated_state(self.clock)
        self.contents = [os.urandom(n) for n in sizes]
        self.chunks = ChunkStore(root / "core")
        self.version = VersionToFetch(
            JOB, MANIFEST, {self.chunks.write(c): len(c) for c in self.contents}
        )

    async def start(self) -> None:
        self.mesh = await self.joined("trainer/job", "trainer", "one", None)

        async def files() -> ChunkStore:
            return self.chunks

        self.broadcasts = Broadcaster(self.mesh, files)
        self.core = Core(self.broadcasts)
        await self.mesh.join(self.core)
        self._left.push_async_callback(self.mesh.leave)
        self._left.push_async_callback(self.broadcasts.stop)
        await self.broadcasts.set_version(MANIFEST)

    async def joined(
        self, name: str, kind: str, host: str, actor: Actor | None, **more: Any
    ) -> Mesh:
        place = self.root / host
        place.mkdir(exist_ok=True)
        settings = MeshSettings(redis_url="simulated", run_root=str(place), host=host, **more)
        return on_sockets(name, self.state, self.clock, kind=kind, settings=settings)

    async def receiver(
        self, host: str, name: str = "engine", **more: int
    ) -> tuple[CollectiveTransport, ChunkStore]:
        """The way of an engine of a host, and that host's chunks."""
        mesh = await self.joined(f"{name}/{host}", "engine", host, None, **more)
        await mesh.join(None)
        self._left.push_async_callback(mesh.leave)
        chunks = chunk_cache.open_cache(mesh)
        assert chunks is not None
        return CollectiveTransport(mesh, JOB), chunks

    def whole(self, chunks: ChunkStore) -> bool:
        """Whether all of the version is there, and right."""
        digests = self.version.missing
        there = all(chunks.has(d) for d in digests)
        return there and all(
            compute_digest(chunks.chunk_path(d).read_bytes()) == d for d in digests
        )


@asynccontextmanager
async def benched(root: Path, sizes: Sequence[int] = SIZES) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as left:
        bench = Bench(root, left, sizes)
        await bench.start()
        yield bench
