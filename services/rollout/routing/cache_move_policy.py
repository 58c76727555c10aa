"""The policy for cache moves: whether a session's keys and values are sent after it to another
engine.

The target computes them from the front while they come from the back, so a move costs no time of
its own, only bytes. It is spared where it cannot help: where the target has computed all of it
before the first chunk comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

from meshrl.common.api.stats import EngineStats

STEP_TOKENS = 512  # that an engine computes in one step, before which nothing else can come
MIN_MOVES = 3  # moves before they count: the first one opens the connection
MAX_MOVES = 16  # moves: what a network gives changes with what else it carries
REMEASURE_AFTER = (
    64  # times in a row that a move was spared, after which one is made to measure anew
)


@dataclass(frozen=True, slots=True)
class MoveChoice:
    """Whether to send a cache or only to compute it again, and why, for the log."""

    action: Literal["move", "recompute"]
    reason: str


class MoveCosts:
    """How soon moves between two engines, or two kinds of hosts, have brought anything; and what
    prefill takes."""

    def __init__(self) -> None:
        self.bytes_per_token = 0  # in the target's cache; 0: it takes nothing over
        self.prefill_tokens_per_s = 0.0  # the target's rate; 0: not measured yet
        self.skipped_moves = 0  # moves in a row
        self._first_byte_s: deque[float] = deque(maxlen=MAX_MOVES)

    def update_stats(self, stats: EngineStats) -> None:
        """Takes what the target engine publishes of itself."""
        self.bytes_per_token = stats.cache_bytes_per_token
        self.prefill_tokens_per_s = stats.prefill_tokens_per_s

    def record_move(self, first_byte_s: float) -> None:
        """A move brought something after so many seconds; 0: it brought nothing, and tells
        nothing."""
        if first_byte_s > 0:
            self._first_byte_s.append(first_byte_s)

    def choose_action(self, tokens: int) -> MoveChoice:
        """`helpful`'s choice; but after many moves that were spared one is made, as what they take
        may have changed.
        """
        choice = choose_cheaper(tokens, self)
        if choice.action == "move":
            self.skipped_moves = 0
        elif tokens > STEP_TOKENS and self.bytes_per_token:
            self.skipped_moves += 1
            if self.skipped_moves == REMEASURE_AFTER:
                self.skipped_moves = 0
                return MoveChoice(
                    "move", f"measured anew: {choice.reason}, {REMEASURE_AFTER} times in a row"
                )
        return choice

    def predict_prefill_s(self, tokens: int) -> float | None:
        """Seconds to compute so many tokens; None: not measured."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else None

    @property
    def first_byte_s(self) -> float | None:
        """Seconds until something comes; None: not measured. The median, so that a move that was
        stalled changes nothing."""
        return median(self._first_byte_s) if len(self._first_byte_s) >= MIN_MOVES else None


def choose_cheaper(tokens: int, costs: MoveCosts) -> MoveChoice:
    """Whether sending helps a session of `tokens` tokens that have been computed elsewhere."""
    if not costs.bytes_per_token:
        return MoveChoice("recompute", "the engine takes nothing over")
    if tokens <= STEP_TOKENS:
        return MoveChoice("recompute", f"{tokens} tokens are computed in one step")
    first_s, prefill_s = costs.first_byte_s, costs.predict_prefill_s(tokens)
    if first_s is not None and prefill_s is not None and prefill_s <= first_s:
        return MoveChoice(
            "recompute",
            f"{tokens} tokens are computed in {prefill_s:.3g} s, before any come: {first_s:.3g} s",
        )
    return MoveChoice("move", f"{tokens} tokens come while they are computed")
