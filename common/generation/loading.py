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

from meshrl.common.generation.contract import Ints, SessionCache

CHUNK = 128  # tokens that are stored and loaded together: eight blocks (Cake's size)
WORTH = 2 * CHUNK  # tokens from which a prefix is looked for or kept: less is computed in one step
STALL_S = 5.0  # that nothing comes, after which what could only be loaded is computed

Content = NDArray[np.uint8]


@dataclass(frozen=True)
class Origin:
    """What shows which weights a cache is of; see `SessionCache`."""

    first_sampled: int  # place of the first token that was sampled over it
    first_version: int  # the weights that sampled that one


class Loading:
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
        origin: Origin | None = None,
        alone: bool = False,
    ) -> None:
        self.end, self.origin, self.alone = end, origin, alone
        self.expected_s = 0.0  # that a chunk takes to come; 0: nobody knows. The bringer's
        self.cache: SessionCache | None = None  # of which it is; None: its name says what it is
        self.bringers: set[str] = set()  # who look or bring; each is its own's
        self.over = False  # nothing more comes. Of the last bringer
        self.found = 0  # tokens of it that can come, as far as is known. The bringer's
        self.claimed = begin  # tokens that are computed, or just being computed. The engine's
        self.cancelled = False  # nothing more is wanted. The engine's
        self.placed: dict[int, int] = {}  # where stretches begin and end that have come, ahead
        self.loaded = 0  # tokens of them that were jumped over
        self._last_s = now_s
        self._came: deque[tuple[int, int, Content]] = deque()

    # -- whoever brings --------------------------------------------------------------------------

    def wants(self, start: int) -> bool:
        """Whether the chunk that begins at this token is still of use."""
        return not self.cancelled and start >= self.claimed

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have come, and that the engine has not taken yet."""
        return sum(content.nbytes for _, _, content in list(self._came))

    def bring(self, start: int, end: int, content: Content) -> None:
        """Tokens [start, end) have come, checked."""
        self._came.append((start, end, content))

    # -- the engine ------------------------------------------------------------------------------

    def take(self, now_s: float) -> list[tuple[int, int, Content]]:
        """(start, end, content) of what has come since the last call."""
        came = []
        while self._came:
            came.append(self._came.popleft())
        if came:
            self._last_s = now_s
        return came

    def reach(self, computed: int) -> int:
        """How far the slot's cache goes, when so many tokens are computed."""
        while computed in self.placed:
            end = self.placed.pop(computed)
            self.loaded += end - computed
            computed = end
        return computed

    def ended(self, computed: int) -> bool:
        """Whether nothing of it is left to wait for or to jump over."""
        idle = self.over and not self._came
        return not self.placed and (computed >= self.end or idle)

    def stretch(self, computed: int, most: int, tokens_per_s: float, now_s: float) -> int:
        """How many of the next tokens the engine computes in one go, `most` at most, to a chunk's
        border; 0: all that lies ahead will have come before one chunk could be computed.

        `tokens_per_s` is what the engine computes; 0: not measured.
        """
        ahead = min(self.placed, default=self.end)
        gap = ahead - computed
        if self.over and not self._came:
            return min(most, gap) if gap > 0 else most
        if self.alone:
            return 0
        inside = -computed % CHUNK  # tokens of a chunk that was begun: nobody brings those
        load_s = max(self.expected_s, now_s - self._last_s) * (gap - inside) / CHUNK
        share = 0.5
        if tokens_per_s:
            if load_s <= CHUNK / tokens_per_s:
                return min(most, inside, gap)
            share = load_s / (load_s + gap / tokens_per_s)
        border = (computed + int(gap * share)) // CHUNK * CHUNK
        least = (computed // CHUNK + 1) * CHUNK
        return min(most, max(border, least) - computed, gap)

    def stalled(self, now_s: float) -> bool:
        """Whether nothing has come for so long that nobody should wait for it alone."""
        return now_s - self._last_s > STALL_S


@dataclass(frozen=True)
class Sought:
    """What a slot is going to need: all its tokens but the last may be found."""

    tokens: Ints  # [n]
    computed: int  # of them, in the cache already
    session: int  # negative: none
    adapter: str


@dataclass(frozen=True)
class KeptPrefix:
    """What a slot has computed, at the moment before it may be lost."""

    tokens: Ints  # [n], of which all are computed
    session: int  # negative: none
    adapter: str
    pure: bool  # the weights that are loaded computed all of it
    lost: bool  # the cache lets go of it now; else it keeps it for a while
    stop_s: float  # that the engine may stand for it
    origin: Origin  # place n: no token was sampled over it
    read: Callable[[int, int], Content]  # copies tokens [start, end); valid during the call only


class Prefixes(Protocol):
    """Keeps keys and values outside of the cache, and finds them again. The engine's thread calls
    it, and it never waits.
    """

    def find(self, sought: Sought) -> Loading | None:
        """What will come of it, perhaps nothing; None: it is not worth a look."""

    def keep(self, kept: KeptPrefix) -> None:
        """Copies out what is worth it."""

    def release(self, sessions: Sequence[int]) -> None:
        """These sessions have ended: nobody asks for what was theirs alone."""
