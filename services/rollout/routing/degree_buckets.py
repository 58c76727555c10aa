"""Buckets that follow the present engines: one per degree of tensor parallelism, short lengths for
small degrees (C-MLFQ: Libra, arXiv 2606.03077).

Each bucket receives the share of the work that its engines can do. Past trajectories are sorted by
length. They are cut where the cumulative share of tokens equals the cumulative share of rates.
Libra's code has the bounds in a file; here they follow lengths and gangs as these change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from meshrl.services.rollout.routing.queue_policy import LengthBucket

MIN_PAST = 16  # trajectories before their lengths count
MIN_TOKENS = 512  # tokens of an engine before its rate counts


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """Published counters of an engine since its start."""

    tensor_parallel_size: int
    tokens: int = 0  # generated
    busy_s: float = 0.0  # computation time


def build_buckets(
    engines: Sequence[MeasuredEngine], past_lengths: Sequence[int], max_length: int, batch_size: int
) -> list[LengthBucket]:
    """Build the buckets for these engines, one per degree, by `past_lengths` in tokens. The last
    bucket accepts lengths up to `max_length`; engines decode `batch_size` requests together.
    """
    degrees = sorted({engine.tensor_parallel_size for engine in engines})
    rates = _measure_rates(engines, degrees)
    total_rate = sum(rates.values())
    bounds: list[int] = []
    share = Fraction()
    for number, degree in enumerate(degrees):
        share += rates[degree] / total_rate
        last = number == len(degrees) - 1
        bound = max_length if last else _find_length_quantile(past_lengths, share, max_length)
        bounds.append(max(bound, bounds[-1] + 1 if bounds else 1))
    counts = {d: sum(engine.tensor_parallel_size == d for engine in engines) for d in degrees}
    return [
        LengthBucket(bound, batch_size, float(counts[degree]))
        for bound, degree in zip(bounds, degrees, strict=True)
    ]


def _measure_rates(
    engines: Sequence[MeasuredEngine], degrees: Sequence[int]
) -> Mapping[int, Fraction]:
    """Return the measured tokens per second of all engines of each degree.

    If a degree has not been measured, all count by their workers. Rates are fractions: the quotient
    of two floats may be infinite or zero, and then no share is a number.
    """
    found: dict[int, Fraction] = {}
    for degree in degrees:
        degree_engines = [engine for engine in engines if engine.tensor_parallel_size == degree]
        tokens = sum(e.tokens for e in degree_engines)
        busy_s = sum((Fraction(e.busy_s) for e in degree_engines), Fraction())
        if tokens < MIN_TOKENS or busy_s <= 0:
            return {
                d: Fraction(
                    sum(e.tensor_parallel_size for e in engines if e.tensor_parallel_size == d)
                )
                for d in degrees
            }
        found[degree] = len(degree_engines) * tokens / busy_s
    return found


def _find_length_quantile(past_lengths: Sequence[int], share: Fraction, max_length: int) -> int:
    """Return the length up to which trajectories have that share of all tokens. With too few
    lengths return that share of the longest length.
    """
    if len(past_lengths) < MIN_PAST:
        return max(1, int(share * max_length))
    lengths = sorted(past_lengths)
    total, so_far = sum(lengths), 0
    for length in lengths:
        so_far += length
        if so_far >= share * total:
            return max(1, length)
    return lengths[-1]
