"""Meeting point of computing a prefix from the front and loading it from the back. It is solved in
closed form, and simulated as events by the engine's own rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshrl.common.generation.builtin.scheduler import PrefillRate
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS, PrefixLoad
from meshrl.common.job.memory.cache_blocks import MAX_PREFILL_TOKENS

NO_CONTENT = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class PrefixCurve:
    """Cost of computing: `first_s` for the first chunk of `chunk_tokens` tokens, `slope_s` more for
    each later chunk, as its attention covers more tokens.
    """

    first_s: float
    slope_s: float
    chunk_tokens: int = MAX_PREFILL_TOKENS

    def predict_compute_s(self, start: float, end: float) -> float:
        """Predict the seconds of tokens [start, end)."""
        a, b = start / self.chunk_tokens, end / self.chunk_tokens
        # The sum over whole chunks of first + slope * i, at any position.
        return self.first_s * (b - a) + self.slope_s * (b * (b - 1) - a * (a - 1)) / 2


@dataclass(frozen=True)
class MeetingPoint:
    """Meeting point of front and back, with its time."""

    seconds: float
    computed_tokens: float  # computed tokens


def solve_closed_form(curve: PrefixCurve, load_s_per_token: float, tokens: int) -> MeetingPoint:
    """Solve for equal times of both sides: F(k) = load_s * (tokens - k), with `load_s_per_token`.

    For a linearly growing cost this is a quadratic equation; for a constant cost its solution is Tc
    * Tl / (Tc + Tl).
    """
    c, n = curve.chunk_tokens, float(tokens)
    # F(k) = (first - slope/2) * k/c + slope/2 * (k/c)^2
    square = curve.slope_s / 2 / c**2
    even = (curve.first_s - curve.slope_s / 2) / c + load_s_per_token
    # The positive root, in the form without cancellation for a nearly constant cost.
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
    """Simulate the meeting point by the engine's rules: steps of at most 512 tokens, chunks of 128,
    and its speed estimate. `other_share`: share of each step's tokens used by other requests.
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
    """Find the root of a falling function between two bounds by bisection."""
    low, high = low_bound, high_bound
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
