"""Scene whose prefix is in another host's KV tier and is fetched through the bulk port's token
bucket.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from loadtests.kvload.scene import LATE, WEIGHTS, LoadOnly, Scene, raised, scene
from loadtests.measuring.meshed import FOREVER_S, own_keys, unrenewed
from meshrl.common.base.clock import SystemClock
from meshrl.common.generation.prefix_loading import PrefixLoad, PrefixQuery
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.port import serve_chunks
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.loader import LoadedChunk
from meshrl.services.engine.kv.peers import PeerEngines
from meshrl.services.engine.service import EngineService
from meshrl.sim.engines.simulated_engine import SimulatedEngine

JOB, SECRET = "kvload", "5c" * 32
BEGIN_S = 60.0


class Link:
    """The way to the other host, at no more than a rate that can be set; see `Source`."""

    name = "peers"

    def __init__(self, mesh: Mesh, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self._mesh, self._loop, self._directory = mesh, loop, directory
        self.reads = self.late = 0
        self._bytes_per_s = self._free_s = 0.0
        self._lock = threading.Lock()
        self.settle(0.0)

    def settle(self, bytes_per_s: float) -> None:
        """Set another rate after the last chunk has arrived; 0 removes the limit."""
        with self._lock:
            self._bytes_per_s, self._free_s = bytes_per_s, 0.0
            root, rate = str(self._directory / f"{bytes_per_s:.0f}"), int(bytes_per_s)
            self._mesh.settings = replace(self._mesh.settings, run_root=root, rate_down=rate)
            self._peers = PeerEngines(self._mesh, JOB, self._loop)

    def look_up(self, domain: str, names: Mapping[int, str]) -> Collection[int]:
        with self._lock:
            return self._peers.look_up(domain, names)

    def read(self, domain: str, name: str) -> LoadedChunk | None:
        with self._lock:
            started_s = time.monotonic()
            found = self._peers.read(domain, name)
            if found is not None and self._bytes_per_s:
                paced_s = found[2].nbytes / self._bytes_per_s
                self._free_s = max(started_s, self._free_s) + paced_s
                self.reads += 1
                self.late += time.monotonic() - self._free_s > LATE * paced_s
            return found


class LinkOnly(LoadOnly):
    """Nothing is computed that is on its way from the other host."""

    def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
        here, peers = self._inner.loader, self._inner._peer_loader
        assert peers is not None
        self._inner.loader = peers  # what is loaded alone is looked for nowhere else by itself
        try:
            return super().find_prefix(query)
        finally:
            self._inner.loader = here


@contextmanager
def linked(name: str, length: int, directory: Path) -> Iterator[Scene]:
    """Provide the engine of a model whose prefixes are in another host's KV tier."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="links", daemon=True)
    thread.start()
    hosts = AsyncExitStack()
    try:
        with scene(name, length, directory) as made:
            entering = hosts.enter_async_context(_two_hosts(made.cache))
            here = asyncio.run_coroutine_threadsafe(entering, loop).result(BEGIN_S)
            link = Link(here, loop, directory / "rates")
            engine, clock = made.engine, SystemClock()
            nothing = KVTier("memory", directory / "here", 0, clock.wall)
            cache = HostCache([nothing], clock, engine, "keep", made.wake.set, raised, link)
            cache.set_weights(WEIGHTS)
            made.cache, made.paced, made.load_only = cache, link, LinkOnly
            try:
                yield made
            finally:
                cache.close()
    finally:
        asyncio.run_coroutine_threadsafe(hosts.aclose(), loop).result(BEGIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def _two_hosts(cache: HostCache) -> AsyncIterator[Mesh]:
    """Provide the requesting host; the other serves the KV tiers of `cache`."""
    keys = own_keys()
    here, there = (unrenewed(f"engine/{name}", keys) for name in ("here", "there"))
    service = EngineService(there, SimulatedEngine(there.clock, 1), lambda action: action())
    service.use_host_cache(cache)
    bulk = serve_chunks(there, cache.chunk_store, accepts_uploads=False)
    here.start()
    await there.join(service, bulk_address=bulk.address)
    entry = RegistryEntry(
        there.name,
        "engine",
        address=there.transport.address,
        bulk=bulk.address,
        host="another",
        incarnation=there.incarnation,
        stats={"job": JOB},
    )
    await registry.register(here.state, entry, int(FOREVER_S * 1000))
    try:
        yield here
    finally:
        bulk.close()
        await here.leave()
        await there.leave()
