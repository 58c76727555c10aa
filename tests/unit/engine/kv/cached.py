"""An engine that keeps what its cache has no room for on shelves of a directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import SystemClock
from meshrl.common.generation.builtin.build import TorchEngine
from meshrl.common.generation.contract import Request
from meshrl.services.engine.kv.chunk_files import FoundChunk
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.shelf import KVTier
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import Heard, Listener, built_in

LENGTH = 1024
BUDGET = 64 << 20


@contextmanager
def cached(
    directory: Path,
    path: str = "native",
    slots: int = 4,
    policy: str = "keep",
    budget: int = BUDGET,
    weights: str = "v0",
    **more: Any,
) -> Iterator[tuple[TorchEngine, HostCache]]:
    """An engine of version 0 with its shelf."""
    clock = SystemClock()
    engine = built_in(path, slots, LENGTH, clock=clock, kv_on_update=policy, **more)
    shelf = KVTier("disk", directory, budget, clock.wall)
    cache = HostCache([shelf], clock, engine, policy, lambda: None, raised)
    engine.prefixes = cache
    cache.computing(weights)
    try:
        yield engine, cache
    finally:
        cache.close()


def settled(cache: HostCache) -> None:
    """All that the engine has let go of is written."""
    assert cache.writer.flush(scaled(20.0))


def on_shelves(cache: HostCache) -> list[FoundChunk]:
    """All chunks that lie there."""
    return [one for shelf in cache._shelves for one in shelf.files.scan()]


def arrived(engine: TorchEngine) -> None:
    """All has come that is wanted of what the engine is loading."""
    until = time.monotonic() + scaled(20)
    while any(not load.over for load in engine.schedule.loads.under_way.values()):
        time.sleep(0.001)
        assert time.monotonic() < until, "a load does not end"


def run(engine: TorchEngine, asked: Request, *, loading: bool = False) -> Heard:
    """What an engine answers, in no hurry: with `loading`, what can come comes after its first
    step."""
    listener = Listener(engine)
    engine.submit([asked])
    engine.step()
    if loading:
        arrived(engine)
    until = time.monotonic() + scaled(20)
    while not listener.of(asked.id).finish:
        if not engine.step():
            time.sleep(0.001)
        listener.drain()
        assert time.monotonic() < until, "it waits for ever"
    return listener.of(asked.id)


def raised(error: BaseException) -> None:
    """A thread has ended by it."""
    raise error
