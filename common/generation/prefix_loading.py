"""A prefix that is computed from its front while its keys and values are loaded from the back
(Cake, arXiv 2410.03065, section 4): what the thread that computes and those that load share.

Chunks of 128 tokens come from the last one down. The engine computes from the first token up, and
jumps over what has come when it gets there; where a chunk is missing in between, it is computed.
So neither side waits for the other, and either may stall, fail or end at any time. Nothing is
foretold but the length of the next stretch, and what was measured for that may be wrong: it costs a
chunk at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.generation.engine_contract import IntArray, SessionCache

CHUNK_TOKENS = 128  # tokens that are stored and loaded together: eight blocks (Cake's size)
MIN_PREFIX_TOKENS = (
    2 * CHUNK_TOKENS
)  # tokens from which a prefix is looked for or kept: less is computed in one step
STALL_TIMEOUT_S = 5.0  # that nothing comes, after which what could only be loaded is computed

ChunkBytes = NDArray[np.uint8]


@dataclass(frozen=True)
class CacheOrigin:
    """What shows which weights a cache is of; see `SessionCache`."""

    first_sampled_index: int  # place of the first token that was sampled over it
    first_version: int  # the weights that sampled that one


class PrefixLoad:
    """The tokens [begin, end) of a slot on their way. `alone`: other weights made some of it than
    are loaded, so nothing may be computed in front of it, and it comes from the front; else front
    and back fit each other. `origin` is that of its session's cache, if it is known.

    One thread brings, another one takes; each attribute has one writer.
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
        self.expected_chunk_s = 0.0  # that a chunk takes to come; 0: nobody knows. The bringer's
        self.session_cache: SessionCache | None = (
            None  # of which it is; None: its name says what it is
        )
        self.loaders: set[str] = set()  # who look or bring; each is its own's
        self.is_finished = False  # nothing more comes. Of the last bringer
        self.num_available = 0  # tokens of it that can come, as far as is known. The bringer's
        self.claimed_end = begin  # tokens that are computed, or just being computed. The engine's
        self.is_cancelled = False  # nothing more is wanted. The engine's
        self.loaded_spans: dict[
            int, int
        ] = {}  # where stretches begin and end that have come, ahead
        self.num_skipped = 0  # tokens of them that were jumped over
        self._last_received_s = now_s
        self._received: deque[tuple[int, int, ChunkBytes]] = deque()

    # -- whoever brings --------------------------------------------------------------------------

    def needs_chunk(self, start: int) -> bool:
        """Whether the chunk that begins at this token is still of use."""
        return not self.is_cancelled and start >= self.claimed_end

    @property
    def received_bytes(self) -> int:
        """Bytes that have come, and that the engine has not taken yet."""
        return sum(content.nbytes for _, _, content in list(self._received))

    def add_chunk(self, start: int, end: int, content: ChunkBytes) -> None:
        """Tokens [start, end) have come, checked."""
        self._received.append((start, end, content))

    # -- the engine ------------------------------------------------------------------------------

    def take_chunks(self, now_s: float) -> list[tuple[int, int, ChunkBytes]]:
        """(start, end, content) of what has come since the last call."""
        came = []
        while self._received:
            came.append(self._received.popleft())
        if came:
            self._last_received_s = now_s
        return came

    def skip_loaded(self, computed: int) -> int:
        """How far the slot's cache goes, when so many tokens are computed."""
        while computed in self.loaded_spans:
            end = self.loaded_spans.pop(computed)
            self.num_skipped += end - computed
            computed = end
        return computed

    def is_done(self, computed: int) -> bool:
        """Whether nothing of it is left to wait for or to jump over."""
        idle = self.is_finished and not self._received
        return not self.loaded_spans and (computed >= self.end or idle)

    def plan_compute_tokens(
        self, computed: int, max_tokens: int, tokens_per_s: float, now_s: float
    ) -> int:
        """How many of the next tokens the engine computes in one go, `most` at most, to a chunk's
        border; 0: all that lies ahead will have come before one chunk could be computed.

        `tokens_per_s` is what the engine computes; 0: not measured.
        """
        ahead = min(self.loaded_spans, default=self.end)
        gap = ahead - computed
        if self.is_finished and not self._received:
            return min(max_tokens, gap) if gap > 0 else max_tokens
        if self.is_front_first:
            return 0
        inside = -computed % CHUNK_TOKENS  # tokens of a chunk that was begun: nobody brings those
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
        """Whether nothing has come for so long that nobody should wait for it alone."""
        return now_s - self._last_received_s > STALL_TIMEOUT_S


@dataclass(frozen=True)
class PrefixQuery:
    """What a slot is going to need: all its tokens but the last may be found."""

    tokens: IntArray  # [n]
    num_computed_tokens: int  # of them, in the cache already
    session: int  # negative: none
    adapter: str


@dataclass(frozen=True)
class OffloadedPrefix:
    """What a slot has computed, at the moment before it may be lost."""

    tokens: IntArray  # [n], of which all are computed
    session: int  # negative: none
    adapter: str
    is_single_version: bool  # the weights that are loaded computed all of it
    is_evicted: bool  # the cache lets go of it now; else it keeps it for a while
    copy_budget_s: float  # that the engine may stand for it
    origin: CacheOrigin  # place n: no token was sampled over it
    read: Callable[[int, int], ChunkBytes]  # copies tokens [start, end); valid during the call only


class PrefixStore(Protocol):
    """Keeps keys and values outside of the cache, and finds them again. The engine's thread calls
    it, and it never waits.
    """

    def find_prefix(self, query: PrefixQuery) -> PrefixLoad | None:
        """What will come of it, perhaps nothing; None: it is not worth a look."""

    def offload(self, prefix: OffloadedPrefix) -> None:
        """Copies out what is worth it."""

    def release_sessions(self, sessions: Sequence[int]) -> None:
        """These sessions have ended: nobody asks for what was theirs alone."""
