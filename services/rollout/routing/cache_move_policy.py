"""Policy of cache moves: whether a session's KV cache is sent to its next engine.

The target computes it from the front while chunks arrive from the back. So a move costs bytes but
no additional time. A move is skipped if the target computes the whole cache before the first chunk
arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

from meshrl.common.api.stats import EngineStats

STEP_TOKENS = 512  # computed by an engine in one step, before any chunk arrives
MIN_MOVES = 3  # moves before they count: the first one opens the connection
MAX_MOVES = 16  # moves in the median, as network load changes
REMEASURE_AFTER = 64  # skipped moves in a row, after which one is made as a new measurement


@dataclass(frozen=True, slots=True)
class MoveChoice:
    """Decision to send a cache or to recompute it, with the reason for the log."""

    action: Literal["move", "recompute"]
    reason: str


class MoveCosts:
    """Measured costs of moves between two engines, or two kinds of hosts: time to the first bytes,
    and prefill rate.
    """

    def __init__(self) -> None:
        self.bytes_per_token = 0  # in the target's cache; 0: it accepts no caches
        self.prefill_tokens_per_s = 0.0  # the target's rate; 0: not measured yet
        self.skipped_moves = 0  # moves in a row
        self._first_byte_s: deque[float] = deque(maxlen=MAX_MOVES)

    def update_stats(self, stats: EngineStats) -> None:
        """Update the costs from the published stats of the target engine."""
        self.bytes_per_token = stats.cache_bytes_per_token
        self.prefill_tokens_per_s = stats.prefill_tokens_per_s

    def record_move(self, first_byte_s: float) -> None:
        """Record the seconds to the first bytes of a move; 0: nothing arrived, which is ignored."""
        if first_byte_s > 0:
            self._first_byte_s.append(first_byte_s)

    def choose_action(self, tokens: int) -> MoveChoice:
        """Choose by `choose_cheaper`; after many skipped moves make one, as its costs may have
        changed.
        """
        choice = choose_cheaper(tokens, self)
        if choice.action == "move":
            self.skipped_moves = 0
        elif tokens > STEP_TOKENS and self.bytes_per_token:
            self.skipped_moves += 1
            if self.skipped_moves == REMEASURE_AFTER:
                self.skipped_moves = 0
                return MoveChoice(
                    "move", f"measured again: {choice.reason}, {REMEASURE_AFTER} times in a row"
                )
        return choice

    def predict_prefill_s(self, tokens: int) -> float | None:
        """Predict the seconds to compute `tokens` tokens; None: not measured."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else None

    @property
    def first_byte_s(self) -> float | None:
        """Median seconds until the first bytes arrive, robust to a stalled move; None: not
        measured.
        """
        return median(self._first_byte_s) if len(self._first_byte_s) >= MIN_MOVES else None


def choose_cheaper(tokens: int, costs: MoveCosts) -> MoveChoice:
    """Choose between a move and recomputation for a session of `tokens` tokens."""
    if not costs.bytes_per_token:
        return MoveChoice("recompute", "the engine accepts no cache transfer")
    if tokens <= STEP_TOKENS:
        return MoveChoice("recompute", f"{tokens} tokens are computed in one step")
    first_s, prefill_s = costs.first_byte_s, costs.predict_prefill_s(tokens)
    if first_s is not None and prefill_s is not None and prefill_s <= first_s:
        return MoveChoice(
            "recompute",
            f"{tokens} tokens are computed in {prefill_s:.3g} s, and the first byte arrives "
            f"after {first_s:.3g} s",
        )
    return MoveChoice("move", f"{tokens} tokens start to arrive before they could be computed")
