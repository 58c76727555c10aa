"""Loader of prefix chunks while engines compute: one thread for each source of chunks.

Of all requested chunks it loads the one with the highest computing cost per byte. All chunks of an
engine have one size, and attention makes later ones dearer: so it picks the chunk furthest back, of
any request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshrl.common.base.clock import Clock
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, ChunkBytes, PrefixLoad
from meshrl.services.engine.kv.chunk_files import ChunkHeader
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.offload_policy import TransferRate

MAX_UNREAD_BYTES = 512 << 20  # loaded bytes that the engine has not installed yet
RESERVED_S = 60.0  # lifetime of a reservation of chunks that are to be loaded
POLL_S = 0.05  # interval of polls for chunks that the engine has installed

LoadedChunk = tuple[str, ChunkHeader, ChunkBytes]  # name of the tier, header, bytes


class ChunkSource(Protocol):
    """Source of chunks. It may be slow, and reports a failure by returning nothing."""

    name: str

    def look_up(self, domain: str, names: Mapping[int, str]) -> Collection[int]:
        """Return the available ones of these chunks, by their first tokens."""

    def read(self, domain: str, name: str) -> LoadedChunk | None:
        """Read and verify a chunk; return None if the source no longer has it."""


class LocalTiers:
    """KV tiers of this host, the nearest first."""

    name = "shelves"

    def __init__(self, tiers: Sequence[KVTier], clock: Clock) -> None:
        self._tiers, self._clock = tiers, clock

    def look_up(self, domain: str, names: Mapping[int, str]) -> list[int]:
        until_s = self._clock.wall() + RESERVED_S
        return [
            start
            for start, name in names.items()
            if any(shelf.files.reserve(domain, name, until_s) for shelf in self._tiers)
        ]

    def read(self, domain: str, name: str) -> LoadedChunk | None:
        for shelf in self._tiers:
            found = shelf.files.read(domain, name)
            if found is not None:
                return (shelf.name, *found)
        return None


@dataclass
class PrefixRequest:
    """Prefix of which some chunks may be available."""

    load: PrefixLoad
    domain: str
    compute_names: Callable[
        [], Mapping[int, str]
    ]  # chunk names by first token; computed once, because that is expensive
    available: dict[int, str] = field(default_factory=dict)  # chunks that can still be loaded

    def choose_next_chunk(self) -> int | None:
        """Return the first token of the next chunk to load, or None."""
        for start in list(self.available):
            if not self.load.needs_chunk(start):
                del self.available[start]
        if not self.available:
            return None
        return min(self.available) if self.load.is_front_first else max(self.available)


def choose_chunk(requests: Sequence[PrefixRequest]) -> tuple[PrefixRequest, int] | None:
    """Choose the request and the chunk to load next.

    Requests whose engine waits, because only loading helps them, come first.
    """
    offers = [(one, start) for one in requests if (start := one.choose_next_chunk()) is not None]
    if not offers:
        return None
    return max(offers, key=lambda offer: (offer[0].load.is_front_first, offer[1]))


class ChunkLoader:
    """Thread that loads requested chunks from one source until it is closed.

    On that thread it calls `on_loaded(tier, header, bytes)` for each chunk, then `wake`; `on_error`
    if the thread ends otherwise. `on_missing` receives requests for chunks that the source lacks.
    """

    def __init__(
        self,
        source: ChunkSource,
        clock: Clock,
        wake: Callable[[], None],
        on_loaded: Callable[[str, ChunkHeader, int], None],
        on_error: Callable[[BaseException], None],
        on_missing: Callable[[PrefixRequest], None] = lambda _: None,
    ) -> None:
        self._source, self._clock = source, clock
        self._wake, self._on_loaded, self._on_error, self._on_missing = (
            wake,
            on_loaded,
            on_error,
            on_missing,
        )
        self.rates: dict[str, TransferRate] = {}
        self._added: list[PrefixRequest] = []
        self._requests: list[PrefixRequest] = []
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv {source.name}", daemon=True)
        self._thread.start()

    def get_rate(self, tier: str) -> TransferRate:
        return self.rates.setdefault(tier, TransferRate())

    def add(self, request: PrefixRequest) -> None:
        request.load.loaders.add(self._source.name)
        with self._condition:
            self._added.append(request)
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:
            if not self._closed:
                self._on_error(error)
        finally:
            for load in [*self._added, *self._requests]:
                self._finish(load)

    def _run_once(self) -> bool:
        with self._condition:
            while not (self._added or self._requests or self._closed):
                self._condition.wait()
            if self._closed:
                return False
            new, self._added = self._added, []
        for load in new:
            self._look_up(load)
            self._requests.append(load)
        chosen = choose_chunk(self._requests)
        for load in [one for one in self._requests if one.choose_next_chunk() is None]:
            self._requests.remove(load)
            self._finish(load)
        if chosen is not None:
            self._load_chunk(*chosen)
        return True

    def _finish(self, request: PrefixRequest) -> None:
        request.load.loaders.discard(self._source.name)
        if not request.load.loaders:
            request.load.is_finished = True
        self._wake()

    def _look_up(self, request: PrefixRequest) -> None:
        load = request.load
        if load.is_cancelled:
            return
        names = {
            start: name
            for start, name in request.compute_names().items()
            if load.needs_chunk(start)
        }
        there = set(self._source.look_up(request.domain, names))
        for start, name in names.items():
            if start in there:
                request.available[start] = name
            elif load.is_front_first:
                break  # chunks behind a gap are of no use
        missing = {start: name for start, name in names.items() if start not in there}
        if missing and not load.is_front_first:
            self._on_missing(PrefixRequest(load, request.domain, lambda: missing))
        load.num_available += CHUNK_TOKENS * len(request.available)

    def _load_chunk(self, request: PrefixRequest, start: int) -> None:
        name, load = request.available.pop(start), request.load
        began = self._clock.monotonic()
        found = self._source.read(request.domain, name)
        if found is None or found[1].start_token != start:
            if load.is_front_first:
                request.available.clear()
            return
        tier, head, content = found
        pace = self.get_rate(tier)
        pace.add(content.nbytes, self._clock.monotonic() - began)
        if load.needs_chunk(start):
            load.expected_chunk_s = content.nbytes * pace.s_per_byte * len(self._requests)
            load.add_chunk(start, start + head.tokens, content)
            self._on_loaded(tier, head, content.nbytes)
            self._wake()
            while (
                not load.is_cancelled
                and not self._closed
                and load.received_bytes > MAX_UNREAD_BYTES
            ):
                with self._condition:
                    self._condition.wait(POLL_S)
