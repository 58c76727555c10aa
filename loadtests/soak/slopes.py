"""Whether a quantity grows: the slope of samples, judged so that a few odd ones change nothing."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import combinations

Samples = Sequence[tuple[float, float]]  # (seconds, value), in order of time
PAIRS = 20_000  # beyond so many pairs a fixed draw of them says the same to within a percent


def slope(samples: Samples) -> float:
    """Units per second: the median of the slopes of all pairs (Theil 1950, Sen 1968); 0 for fewer
    than two samples.
    """
    pairs = [(a, b) for a, b in combinations(samples, 2) if b[0] > a[0]]
    if len(pairs) > PAIRS:
        pairs = random.Random(0).sample(pairs, PAIRS)
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs) if pairs else 0.0


def second_half(samples: Samples, end: float) -> Samples:
    """Those of the second half of the time from 0 to `end`."""
    return [sample for sample in samples if sample[0] >= end / 2]


def rise(samples: Samples) -> float:
    """By how many units the samples rise from the first to the last, by their slope."""
    return slope(samples) * (samples[-1][0] - samples[0][0]) if samples else 0.0


def share(samples: Samples) -> float:
    """`rise` as a share of the median; 0 when that is 0."""
    middle = statistics.median(value for _, value in samples) if samples else 0.0
    return rise(samples) / middle if middle else 0.0
