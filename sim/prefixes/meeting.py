"""When computing a prefix from the front meets loading it from the back: in closed form, and as a
series of events that the engine's own rules make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshrl.common.generation.builtin.schedule import PREFILL_TOKENS, PrefillRate
from meshrl.common.generation.loading import CHUNK, Loading

NOTHING = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class PrefixCurve:
    """What computing takes: `first_s` for the first chunk of `chunk` tokens, `slope_s` more for
    each that follows, as attention looks back at more.
    """

    first_s: float
    slope_s: float
    chunk: int = PREFILL_TOKENS

    def compute_s(self, start: float, end: float) -> float:
        """Seconds for tokens [start, end)."""
        a, b = start / self.chunk, end / self.chunk
        # The sum over whole chunks of first + slope * i, read at any place.
        return self.first_s * (b - a) + self.slope_s * (b * (b - 1) - a * (a - 1)) / 2


@dataclass(frozen=True)
class Met:
    """How long it took, and where front and back met."""

    seconds: float
    tokens: float  # that were computed


def closed_form(curve: PrefixCurve, load_s: float, tokens: int) -> Met:
    """Where both sides take as long: F(k) = load_s * (tokens - k). `load_s` is a token's.

    For a cost that grows evenly this is a quadratic equation; for an even cost its solution is
    Tc * Tl / (Tc + Tl).
    """
    c, n = curve.chunk, float(tokens)
    # F(k) = (first - slope/2) * k/c + slope/2 * (k/c)^2
    square = curve.slope_s / 2 / c**2
    even = (curve.first_s - curve.slope_s / 2) / c + load_s
    # The positive root, in the form that does not cancel where the cost hardly grows.
    k = 2 * load_s * n / (even + math.sqrt(even * even + 4 * square * load_s * n))
    k = min(k, n)
    return Met(load_s * (n - k), k)


def events(curve: PrefixCurve, load_s: float, tokens: int, others: float = 0.0) -> Met:
    """The same by the engine's rules: steps of 512 tokens at most, chunks of 128, and what it knows
    of its speed. `others`: share of each step's tokens that other requests take.
    """
    load, rate = Loading(0, tokens // CHUNK * CHUNK, 0.0), PrefillRate()
    load.expected_s = 0.0
    most = max(1, int(PREFILL_TOKENS * (1 - others)))
    now_s, computed, done = 0.0, 0, 0
    coming, comes_s = load.end - CHUNK, CHUNK * load_s
    while computed < tokens:
        while comes_s <= now_s and load.wants(coming):
            load.bring(coming, coming + CHUNK, NOTHING)
            load.expected_s = CHUNK * load_s
            coming, comes_s = coming - CHUNK, comes_s + CHUNK * load_s
        load.over = not load.wants(coming)
        for start, end, _ in load.take(now_s):
            if start >= load.claimed:
                load.placed[start] = end
        computed = load.claimed = load.reach(computed)
        ahead = tokens - computed
        if not ahead:
            break
        count = min(ahead, most)
        if not load.ended(computed):
            count = min(ahead, load.stretch(computed, most, rate.tokens_per_s, now_s))
        if not count:
            now_s = max(now_s, comes_s)
            continue
        load.claimed = computed + count
        took_s = curve.compute_s(computed, computed + count) / (1 - others)
        rate.add(count, count, took_s)
        now_s, computed, done = now_s + took_s, computed + count, done + count
    return Met(now_s, float(done))


def setting(reached: float, wanted: float, figure: Callable[[float], float]) -> float:
    """The value between `reached` and `wanted` at which a falling `figure` is 0, by bisection."""
    low, high = reached, wanted
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if figure(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
