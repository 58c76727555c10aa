"""The policy for cache moves: a session's keys and values go with it to another engine, or are
computed there again.

They go if copying out, the network and copying in take no longer than the prefill of what would be
lost (Libra, arXiv 2606.03077: migrate iff offload + reshard + network + reload <= prefill). The
first few move to measure that. While it is not measured, short contexts are computed again and long
ones move, at Libra's limits.

What a move takes is a latency and a time for each byte, fitted to the last moves by the median of
the slopes of all pairs (Theil-Sen; P. K. Sen, JASA 63, 1968), so that a move that was stalled
changes nothing. The prefill rate is the target's own running average; attention makes long contexts
slower than it says, so that in doubt they are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, Literal

RECOMPUTED = 4096  # tokens up to which a context is computed again while nothing is measured
RECOMPUTED_ACROSS = 2048  # the same from one host to another; both are Libra's
ENOUGH = 3  # moves before they count: the first one opens the connection
REMEMBERED = 16  # moves: what a network gives changes with what else it carries
APART = 1.5  # two moves tell a time for each byte if one is so many times as large
PROBES = 6  # moves that are made to measure what they take; some may bring nothing
AGAIN = 64  # times in a row that moving was found too slow, after which it is measured anew


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether to move a cache or compute it again, and why, for the log."""

    answer: Literal["move", "recompute"]
    reason: str


class MoveCosts:
    """What moves between two engines, or two kinds of hosts, have taken; and what prefill takes."""

    def __init__(self, across_hosts: bool = False) -> None:
        self.across_hosts = across_hosts
        self.bytes_per_token = 0  # in the target's cache; 0: it takes nothing over
        self.prefill_tokens_per_s = 0.0  # the target's rate; 0: not measured yet
        self.found_slow = 0  # answers in a row that moving takes longer
        self._probes = 0
        self._moves: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # (bytes, seconds)

    def published(self, stats: Mapping[str, Any]) -> None:
        """Takes what the target engine publishes of itself."""
        self.bytes_per_token = int(stats.get("cache_bytes_per_token", 0))
        self.prefill_tokens_per_s = float(stats.get("prefill_tokens_per_s", 0.0))

    def moved(self, size: int, seconds: float) -> None:
        """A move brought `size` bytes; one that brought none tells nothing."""
        if size > 0 and seconds > 0:
            self._moves.append((size, seconds))
            self.found_slow = 0

    def choose(self, tokens_cached: int, tokens_known: int) -> Choice:
        """`cheaper`'s choice. But a move is made, to measure it, where its cost is unknown, or
        where it was found slow so often that this may have changed.
        """
        choice = cheaper(tokens_cached, tokens_known, self)
        if choice.answer == "move":
            return choice
        if self.move_s(tokens_cached) is None:
            if self._probes == PROBES or tokens_cached <= 0 or not self.bytes_per_token:
                return choice
            self._probes += 1
            return Choice("move", f"to measure it: {choice.reason}")
        self.found_slow += 1
        long = tokens_known > self.recomputed_up_to
        if self.found_slow < AGAIN or not long or tokens_cached <= 0 or not self.bytes_per_token:
            return choice
        self.found_slow = 0
        return Choice("move", f"measured anew: {choice.reason}, {AGAIN} times in a row")

    @property
    def recomputed_up_to(self) -> int:
        """Tokens up to which a context is computed again while nothing has been measured."""
        return RECOMPUTED_ACROSS if self.across_hosts else RECOMPUTED

    def prefill_s(self, tokens: int) -> float | None:
        """Seconds to compute so many tokens; None: not measured."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else None

    def move_s(self, tokens: int) -> float | None:
        """Seconds to move what is cached of so many tokens; None: not measured."""
        if len(self._moves) < ENOUGH:
            return None
        size = tokens * self.bytes_per_token
        slopes = [
            (t - s) / (b - a)
            for (a, s), (b, t) in combinations(sorted(self._moves), 2)
            if b >= APART * a
        ]
        if len(slopes) < ENOUGH:  # all of one size: smaller may take as long, larger take longer
            usual = median(b for b, _ in self._moves)
            return median(s for _, s in self._moves) * max(1.0, size / usual)
        per_byte = max(0.0, median(slopes))
        latency = median(s - b * per_byte for b, s in self._moves)
        return max(0.0, latency) + size * per_byte


def cheaper(tokens_cached: int, tokens_known: int, costs: MoveCosts) -> Choice:
    """The cheaper choice for a session of `tokens_known` tokens, `tokens_cached` of them computed
    where it was.
    """
    if tokens_cached <= 0 or not costs.bytes_per_token:
        return Choice("recompute", "there is nothing to move")
    lost = min(tokens_cached, tokens_known)
    move_s, prefill_s = costs.move_s(tokens_cached), costs.prefill_s(lost)
    if move_s is None or prefill_s is None:
        limit = costs.recomputed_up_to
        if tokens_known <= limit:
            return Choice("recompute", f"not measured, and {tokens_known} tokens are <= {limit}")
        return Choice("move", f"not measured, and {tokens_known} tokens are > {limit}")
    told = f"moving {tokens_cached} tokens takes {move_s:.3g} s, computing {lost} {prefill_s:.3g} s"
    return Choice("move" if move_s <= prefill_s else "recompute", told)
