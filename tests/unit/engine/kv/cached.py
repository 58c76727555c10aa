"""An engine that keeps what its cache has no room for on shelves of a directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.clock import SystemClock
from common.generation.builtin.build import TorchEngine
from common.generation.contract import Request
from services.engine.kv.host_cache import HostCache
from services.engine.kv.shelf import Shelf
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
    shelf = Shelf("disk", directory, budget, clock.wall)
    cache = HostCache(
        [shelf],
        clock,
        engine.cache_layout,
        policy,
        engine.cache_bytes_per_token,
        lambda: engine.prefill_tokens_per_s,
        lambda: None,
        engine.keep_all,
        raised,
    )
    engine.prefixes = cache
    cache.computing(weights)
    try:
        yield engine, cache
    finally:
        cache.close()


def run(engine: TorchEngine, asked: Request, first: float = 0.0) -> Heard:
    """What an engine answers; `first` seconds pass after its first step."""
    listener = Listener(engine)
    engine.submit([asked])
    engine.step()
    time.sleep(first)
    until = time.monotonic() + 20
    while not listener.of(asked.id).finish:
        if not engine.step():
            time.sleep(0.001)
        listener.drain()
        assert time.monotonic() < until, "it waits for ever"
    return listener.of(asked.id)


def raised(error: BaseException) -> None:
    """A thread has ended by it."""
    raise error
