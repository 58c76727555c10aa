"""Training core that broadcasts, and hosts that receive, over real sockets."""

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
    """Trainer that answers only requests for broadcasts."""

    def __init__(self, broadcaster: Broadcaster) -> None:
        self.broadcaster, self.request_count = broadcaster, 0

    @call(Trainer.join_broadcast)
    async def join_broadcast(self, request: BroadcastRequest) -> BroadcastPlan:
        self.request_count += 1
        return await self.broadcaster.join_broadcast(request)


class Bench:
    """Hosts by name; the core's chunks are those of the version."""

    def __init__(self, root: Path, stack: AsyncExitStack, sizes: Sequence[int]) -> None:
        self.root, self._stack = root, stack
        self.clock = SystemClock()
        self.state: StateClient = open_simulated_state(self.clock)
        self.contents = [os.urandom(n) for n in sizes]
        self.chunks = ChunkStore(root / "core")
        self.version = VersionToFetch(
            JOB, MANIFEST, {self.chunks.write(c): len(c) for c in self.contents}
        )

    async def start(self) -> None:
        self.mesh = await self.make_mesh("trainer/job", "trainer", "one", None)

        async def open_chunks() -> ChunkStore:
            return self.chunks

        self.broadcaster = Broadcaster(self.mesh, open_chunks)
        self.core = Core(self.broadcaster)
        await self.mesh.join(self.core)
        self._stack.push_async_callback(self.mesh.leave)
        self._stack.push_async_callback(self.broadcaster.stop)
        await self.broadcaster.set_version(MANIFEST)

    async def make_mesh(
        self, name: str, kind: str, host: str, actor: Actor | None, **more: Any
    ) -> Mesh:
        directory = self.root / host
        directory.mkdir(exist_ok=True)
        settings = MeshSettings(redis_url="simulated", run_root=str(directory), host=host, **more)
        return on_sockets(name, self.state, self.clock, kind=kind, settings=settings)

    async def receiver(
        self, host: str, name: str = "engine", **more: int
    ) -> tuple[CollectiveTransport, ChunkStore]:
        """Start an engine on a host and return its transport and the host's chunks."""
        mesh = await self.make_mesh(f"{name}/{host}", "engine", host, None, **more)
        await mesh.join(None)
        self._stack.push_async_callback(mesh.leave)
        chunks = chunk_cache.open_cache(mesh)
        assert chunks is not None
        return CollectiveTransport(mesh, JOB), chunks

    def has_version(self, chunks: ChunkStore) -> bool:
        """Return True if all chunks of the version are present and valid."""
        digests = self.version.missing
        is_present = all(chunks.has(d) for d in digests)
        return is_present and all(
            compute_digest(chunks.chunk_path(d).read_bytes()) == d for d in digests
        )


@asynccontextmanager
async def open_bench(root: Path, sizes: Sequence[int] = SIZES) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        bench = Bench(root, stack, sizes)
        await bench.start()
        yield bench
