"""Engine of a random model, with a disk whose reads are slowed down to a rate."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loadtests.measuring.shapes import Tensors, drawn, shape
from meshrl.common.base.clock import SystemClock
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import NO_SESSION, GenerationRequest
from meshrl.common.generation.prefix_loading import (
    CHUNK_TOKENS,
    ChunkBytes,
    OffloadedPrefix,
    PrefixLoad,
    PrefixQuery,
    PrefixStore,
)
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.kv.chunk_files import (
    ChunkFiles,
    ChunkHeader,
    compute_chunk_names,
    compute_domain,
)
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.kv_tier import KVTier

VOCAB = 2048  # tokens of prompts
WEIGHTS = "the only version"
BUDGET = 8 << 30
LATE = 0.1  # share of a slowed read's time, beyond which it ended late
LONGEST_S = 600.0
# Vocabulary, hidden size, layers, width of a feed-forward part, and of a head.
_SHAPES = {
    "1M": (4096, 128, 2, 512, 32),
    "30M": (32768, 512, 2, 3584, 64),
    "200M": (65536, 1280, 4, 6912, 128),
}


def config(name: str, length: int) -> ModelConfig:
    """Return the config of a wide and flat model, so that a prefill of 16K tokens ends in short
    time.
    """
    vocabulary, hidden, layers, ffn, width = _SHAPES[name]
    about = {"head_dim": width, "tie_embeddings": True, "max_positions": length}
    return shape(hidden, layers, ffn, vocabulary, (4, 4), **about)


class PacedFiles(ChunkFiles):
    """Reads come from the disk itself, at no more than `bytes_per_s`; 0: as fast as they come."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.bytes_per_s = 0.0
        self.reads = self.late = 0
        self._free_s = 0.0
        self._lock = threading.Lock()

    def read(self, domain: str, name: str) -> tuple[ChunkHeader, ChunkBytes] | None:
        with self._lock:  # one at a time, as the loader reads; see `settle`
            rate, path = self.bytes_per_s, self.path(domain, name)
            if not rate:
                return super().read(domain, name)
            started_s = time.monotonic()
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                size = os.fstat(file.fileno()).st_size
            found = super().read(domain, name)
            self._free_s = due = max(started_s, self._free_s) + size / rate
            while (now := time.monotonic()) < due:
                time.sleep(due - now)
            self.reads += 1
            self.late += now - due > LATE * size / rate
            return found

    def settle(self, bytes_per_s: float) -> None:
        """Set another rate after the last read has ended."""
        with self._lock:
            self.bytes_per_s, self._free_s = bytes_per_s, 0.0


class Paced(Protocol):
    """Source of chunks at a limited rate."""

    reads: int  # that were paced
    late: int  # of them, that ended later than they were to

    def settle(self, bytes_per_s: float) -> None:
        """Set another rate; 0 removes the limit."""


class LoadOnly:
    """The same, but nothing is computed that is on its way."""

    def __init__(self, inner: HostCache) -> None:
        self._inner = inner

    def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
        load = self._inner.find_prefix(query)
        if load is not None:
            load.is_front_first = True
        return load

    def offload(self, prefix: OffloadedPrefix) -> None:
        self._inner.offload(prefix)

    def release_sessions(self, sessions: Sequence[int]) -> None:
        self._inner.release_sessions(sessions)


class Scene:
    """Engine, its disk KV tier, and one stored prefix at a time."""

    def __init__(
        self, engine: BuiltinEngine, weights: Tensors, cache: HostCache, files: PacedFiles
    ):
        self.engine, self.cache, self.files = engine, cache, files
        self.paced: Paced = files
        self.load_only: type[LoadOnly] = LoadOnly
        self.wake = threading.Event()
        self._weights = weights
        self._ids = 0
        self.steps: list[tuple[int, float]] = []  # tokens computed, and seconds since the request

    def forget(self, prefixes: PrefixStore | None = None) -> None:
        """Discard computed caches; `prefixes` keeps caches from now on."""
        self.engine.prefix_store = None
        self.engine.update_weights(self._weights, 0)
        self.engine.prefix_store = prefixes

    def request(
        self, tokens: NDArray[np.int32], max_new: int = 1, session: int = NO_SESSION
    ) -> GenerationRequest:
        self._ids += 1
        return GenerationRequest(self._ids, tokens, max_new, 0.0, (), self._ids, session)

    def first_token_s(
        self, tokens: NDArray[np.int32], arm: str, until_s: float = LONGEST_S
    ) -> float:
        """Measure the seconds to the first token after `tokens` by `arm`; at most `until_s`."""
        kept: dict[str, PrefixStore] = {"load": self.load_only(self.cache), "both": self.cache}
        self.forget(kept.get(arm))
        asked, computed = self.request(tokens), self.engine.tokens_computed
        self.steps.clear()
        started_s = time.monotonic()
        self.engine.submit([asked])
        while (took_s := time.monotonic() - started_s) < until_s:
            if self.engine.step():
                done = self.engine.tokens_computed - computed
                self.steps.append((done, time.monotonic() - started_s))
            else:
                self.wake.wait(0.05)
                self.wake.clear()
            if (flush := self.engine.drain_outputs()) is not None and len(flush.tokens):
                return time.monotonic() - started_s
        self.engine.abort([asked.id])
        self.engine.drain_outputs()
        return took_s

    def finish(self) -> None:
        """Compute all requests; wait for pending lookups."""
        while self.engine.num_running or self.engine.num_waiting:
            if not self.engine.step():
                self.wake.wait(0.05)
                self.wake.clear()
            self.engine.drain_outputs()

    def store(self, tokens: NDArray[np.int32]) -> int:
        """Compute a prefix and offload all of it to the KV tier; return its bytes."""
        self.forget()
        domain = compute_domain(WEIGHTS, "", self.engine.cache_layout, "keep")
        names, size = compute_chunk_names(domain, tokens), 0

        class Storing(LoadOnly):
            def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
                return None

            def offload(self, prefix: OffloadedPrefix) -> None:
                nonlocal size
                for index, name in enumerate(names):
                    start = index * CHUNK_TOKENS
                    content = prefix.read(start, start + CHUNK_TOKENS)
                    size += content.nbytes
                    files.write(domain, name, ChunkHeader(start, CHUNK_TOKENS, 1.0, 0), content)

        files, self.engine.prefix_store = self.files, Storing(self.cache)
        self.engine.submit([self.request(tokens)])
        self.finish()
        os.sync()
        return size


@contextmanager
def scene(
    name: str, length: int, directory: Path, slots: int = 2, kv_tokens: int = 0
) -> Iterator[Scene]:
    """Provide the engine of a model, on the native path."""
    torch.set_num_threads(1)
    weights = drawn(config(name, length))
    clock = SystemClock()
    engine = build_engine(
        config(name, length), slots, length, backend="native", kv_cache_tokens=kv_tokens
    )
    engine.wake(weights, 0)
    shelf = KVTier("disk", directory / name, BUDGET, clock.wall)
    shelf.files = files = PacedFiles(shelf.files.directory)
    ready = threading.Event()
    cache = HostCache([shelf], clock, engine, "keep", ready.set, raised)
    cache.set_weights(WEIGHTS)
    cache.writer.flush(LONGEST_S)
    made = Scene(engine, weights, cache, files)
    made.wake = ready
    try:
        yield made
    finally:
        cache.close()


def raised(error: BaseException) -> None:
    raise error
