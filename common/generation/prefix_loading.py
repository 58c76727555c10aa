"""Prefix that an engine computes from its front while its keys and values are loaded from the back.

The method is Cake (arXiv 2410.03065, section 4). This module holds the state that the computing
thread and the loading threads share. Chunks of 128 tokens arrive from the last one down. The engine
computes from the first token up, skips arrived chunks when it reaches them, and computes missing
ones. So neither side waits for the other, and either may stall, fail or end at any time. The only
prediction is the length of the next stretch; a wrong measurement costs at most a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.generation.engine_contract import IntArray, SessionCache

CHUNK_TOKENS = 128  # tokens of a chunk: eight blocks (Cake's size)
# shortest prefix to search or offload, in tokens: a shorter one is computed in one step
MIN_PREFIX_TOKENS = 2 * CHUNK_TOKENS
# time without a chunk after which a prefix that could only be loaded is computed
STALL_TIMEOUT_S = 5.0

ChunkBytes = NDArray[np.uint8]


@dataclass(frozen=True)
class CacheOrigin:
    """Weights that a cache is of, as its tokens show them; see `SessionCache`."""

    first_sampled_index: int  # position of the first token that was sampled over the cache
    first_version: int  # version of the weights that sampled that token


class PrefixLoad:
    """Load of the tokens [begin, end) of a slot.

    `is_front_first`: weights other than the loaded ones made some of it, so nothing may be computed
    in front of it, and it arrives from the front; else computed and loaded parts fit each other.
    `origin` is that of its session's cache, if known.

    One thread adds chunks, another one takes them; each attribute has one writer.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        now_s: float,
        *,
        origin: CacheOrigin | None = None,
        is_front_first: bool = False,
    ) -> None:
        self.end, self.origin, self.is_front_first = end, origin, is_front_first
        self.expected_chunk_s = 0.0  # time per chunk; 0: unknown. Written by the loader
        self.session_cache: SessionCache | None = (
            None  # origin of the cache; None: its name identifies it
        )
        self.loaders: set[str] = set()  # names of active loaders; each writes only its own
        self.is_finished = False  # no more chunks follow. Written by the last loader
        self.num_available = 0  # known number of available tokens. Written by the loader
        # end of computed tokens, including those in work. Written by the engine
        self.claimed_end = begin
        self.is_cancelled = False  # the load is cancelled. Written by the engine
        self.loaded_spans: dict[
            int, int
        ] = {}  # start -> end of received stretches ahead of the computed tokens
        self.num_skipped = 0  # received tokens that were skipped
        self._last_received_s = now_s
        self._received: deque[tuple[int, int, ChunkBytes]] = deque()

    # -- loader side -----------------------------------------------------------------------------

    def needs_chunk(self, start: int) -> bool:
        """Return True if the chunk that begins at this token is still useful."""
        return not self.is_cancelled and start >= self.claimed_end

    @property
    def received_bytes(self) -> int:
        """Received bytes that the engine has not taken yet."""
        return sum(content.nbytes for _, _, content in list(self._received))

    def add_chunk(self, start: int, end: int, content: ChunkBytes) -> None:
        """Add the verified chunk of tokens [start, end)."""
        self._received.append((start, end, content))

    # -- engine side -----------------------------------------------------------------------------

    def take_chunks(self, now_s: float) -> list[tuple[int, int, ChunkBytes]]:
        """Return (start, end, content) of the chunks received since the last call."""
        came = []
        while self._received:
            came.append(self._received.popleft())
        if came:
            self._last_received_s = now_s
        return came

    def skip_loaded(self, computed: int) -> int:
        """Return the end of the slot's cache, given its computed tokens."""
        while computed in self.loaded_spans:
            end = self.loaded_spans.pop(computed)
            self.num_skipped += end - computed
            computed = end
        return computed

    def is_done(self, computed: int) -> bool:
        """Return True if nothing is left to wait for or to skip."""
        idle = self.is_finished and not self._received
        return not self.loaded_spans and (computed >= self.end or idle)

    def plan_compute_tokens(
        self, computed: int, max_tokens: int, tokens_per_s: float, now_s: float
    ) -> int:
        """Return how many tokens to compute next, at most `max_tokens`, up to a chunk's border.

        The result is 0 if all tokens ahead will arrive before one chunk could be computed.
        `tokens_per_s` is the engine's prefill rate; 0: not measured.
        """
        ahead = min(self.loaded_spans, default=self.end)
        gap = ahead - computed
        if self.is_finished and not self._received:
            return min(max_tokens, gap) if gap > 0 else max_tokens
        if self.is_front_first:
            return 0
        inside = -computed % CHUNK_TOKENS  # tokens of a partly computed chunk: no loader adds those
        load_s = (
            max(self.expected_chunk_s, now_s - self._last_received_s)
            * (gap - inside)
            / CHUNK_TOKENS
        )
        share = 0.5
        if tokens_per_s:
            if load_s <= CHUNK_TOKENS / tokens_per_s:
                return min(max_tokens, inside, gap)
            share = load_s / (load_s + gap / tokens_per_s)
        border = (computed + int(gap * share)) // CHUNK_TOKENS * CHUNK_TOKENS
        least = (computed // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        return min(max_tokens, max(border, least) - computed, gap)

    def is_stalled(self, now_s: float) -> bool:
        """Return True if nothing has arrived for so long that the engine should not wait for it
        alone.
        """
        return now_s - self._last_received_s > STALL_TIMEOUT_S


@dataclass(frozen=True)
class PrefixQuery:
    """Query for a slot's prefix: all its tokens but the last may be found."""

    tokens: IntArray  # [n]
    num_computed_tokens: int  # number of tokens in the cache already
    session: int  # negative: none
    adapter: str


@dataclass(frozen=True)
class OffloadedPrefix:
    """Computed tokens of a slot, offered before the slot may lose them."""

    tokens: IntArray  # [n], all computed
    session: int  # negative: none
    adapter: str
    is_single_version: bool  # the loaded weights computed the whole cache
    is_evicted: bool  # the cache evicts it now; else it retains it for a while
    copy_budget_s: float  # limit of the engine's pause for the copy
    origin: CacheOrigin  # position n: no token was sampled over the cache
    read: Callable[[int, int], ChunkBytes]  # copies tokens [start, end); valid during the call only


class PrefixStore(Protocol):
    """Store of keys and values outside of the cache.

    The engine's thread calls it; it never waits.
    """

    def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
        """Start a search and return its load, which may find nothing; None: not worth a search."""

    def offload(self, prefix: OffloadedPrefix) -> None:
        """Copy out the chunks that are worth it."""

    def release_sessions(self, sessions: Sequence[int]) -> None:
        """Release the chunks that belong to these ended sessions alone."""
