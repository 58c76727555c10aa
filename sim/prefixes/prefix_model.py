"""When computing a prefix from the front meets loading it from the back: in closed form, and as a
series of events that the engine's own rules make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshrl.common.generation.builtin.scheduler import MAX_PREFILL_TOKENS, PrefillRate
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, PrefixLoad

NO_CONTENT = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class PrefixCurve:
    """What computing takes: `first_s` for the first chunk of `chunk` tokens, `slope_s` more for
    each that follows, as attention looks back at more.
    """

    first_s: float
    slope_s: float
    chunk_tokens: int = MAX_PREFILL_TOKENS

    def predict_compute_s(self, start: float, end: float) -> float:
        """Seconds for tokens [start, end)."""
        a, b = start / self.chunk_tokens, end / self.chunk_tokens
        # The sum over whole chunks of first + slope * i, read at any place.
        return self.first_s * (b - a) + self.slope_s * (b * (b - 1) - a * (a - 1)) / 2


@dataclass(frozen=True)
class MeetingPoint:
    """How long it took, and where front and back met."""

    seconds: float
    computed_tokens: float  # that were computed


def solve_closed_form(curve: PrefixCurve, load_s_per_token: float, tokens: int) -> MeetingPoint:
    """Where both sides take as long: F(k) = load_s * (tokens - k). `load_s` is a token's.

    For a cost that grows evenly this is a quadratic equation; for an even cost its solution is
    Tc * Tl / (Tc + Tl).
    """
    c, n = curve.chunk_tokens, float(tokens)
    # F(k) = (first - slope/2) * k/c + slope/2 * (k/c)^2
    square = curve.slope_s / 2 / c**2
    even = (curve.first_s - curve.slope_s / 2) / c + load_s_per_token
    # The positive root, in the form that does not cancel where the cost hardly grows.
    k = (
        2
        * load_s_per_token
        * n
        / (even + math.sqrt(even * even + 4 * square * load_s_per_token * n))
    )
    k = min(k, n)
    return MeetingPoint(load_s_per_token * (n - k), k)


def simulate_events(
    curve: PrefixCurve, load_s_per_token: float, tokens: int, other_share: float = 0.0
) -> MeetingPoint:
    """The same by the engine's rules: steps of 512 tokens at most, chunks of 128, and what it knows
    of its speed. `others`: share of each step's tokens that other requests take.
    """
    load, rate = PrefixLoad(0, tokens // CHUNK_TOKENS * CHUNK_TOKENS, 0.0), PrefillRate()
    load.expected_chunk_s = 0.0
    most = max(1, int(MAX_PREFILL_TOKENS * (1 - other_share)))
    now_s, computed, done = 0.0, 0, 0
    coming, comes_s = load.end - CHUNK_TOKENS, CHUNK_TOKENS * load_s_per_token
    while computed < tokens:
        while comes_s <= now_s and load.needs_chunk(coming):
            load.add_chunk(coming, coming + CHUNK_TOKENS, NO_CONTENT)
            load.expected_chunk_s = CHUNK_TOKENS * load_s_per_token
            coming, comes_s = coming - CHUNK_TOKENS, comes_s + CHUNK_TOKENS * load_s_per_token
        load.is_finished = not load.needs_chunk(coming)
        for start, end, _ in load.take_chunks(now_s):
            if start >= load.claimed_end:
                load.loaded_spans[start] = end
        computed = load.claimed_end = load.skip_loaded(computed)
        ahead = tokens - computed
        if not ahead:
            break
        count = min(ahead, most)
        if not load.is_done(computed):
            count = min(ahead, load.plan_compute_tokens(computed, most, rate.tokens_per_s, now_s))
        if not count:
            now_s = max(now_s, comes_s)
            continue
        load.claimed_end = computed + count
        took_s = curve.predict_compute_s(computed, computed + count) / (1 - other_share)
        rate.add_step(count, count, took_s)
        now_s, computed, done = now_s + took_s, computed + count, done + count
    return MeetingPoint(now_s, float(done))


def bisect_root(low_bound: float, high_bound: float, function: Callable[[float], float]) -> float:
    """The value between `reached` and `wanted` at which a falling `figure` is 0, by bisection."""
    low, high = low_bound, high_bound
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
