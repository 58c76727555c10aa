"""Forecast of an instance's next slices: a training step repeats earlier functions; pure.

What followed the longest recent sequence that equals the last slices follows again. A function that
is new repeats if the profile of the instance's kind has its usual gap.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from meshrl.common.api.node import KindUse
from meshrl.services.node.slices.slice_policy import SliceRequest

MOST_SLICES = 64  # retained ones: several steps
MOST_COMPARED = 16  # slices of a sequence


@dataclass(frozen=True, slots=True)
class PastSlice:
    """Slice that has ended; times are in seconds."""

    request: SliceRequest
    gap_s: float  # from the end of the one before to its request
    duration_s: float


class InstanceSlices:
    """Past slices of one instance."""

    def __init__(self) -> None:
        self._past: deque[PastSlice] = deque(maxlen=MOST_SLICES)

    def add(self, past: PastSlice) -> None:
        """Add a slice that has ended."""
        self._past.append(past)

    def find_following(self, current: SliceRequest | None = None) -> list[PastSlice]:
        """Return the slices that are expected to follow, until the sequence repeats.

        `current`: slice that is requested or runs, if any. Empty: unknown.
        """
        past = list(self._past)
        requests = [one.request for one in past] + ([current] if current is not None else [])
        functions = [one.function for one in requests]
        last = len(functions) - 1
        found, most = last, 0
        for index in range(last - 1, -1, -1):
            count = _count_equal(functions, index, last)
            if count > most:
                found, most = index, count
        if most:
            return past[found + 1 :] + [past[found]] * (current is not None)
        known = [one for one in requests[-1:] if math.isfinite(one.repeat_gap_s)]
        return [PastSlice(one, one.repeat_gap_s, one.estimate_s) for one in known]


def _count_equal(functions: list[str], index: int, last: int) -> int:
    """Return how many functions before and at two positions are equal."""
    count = 0
    while (
        count <= min(index, MOST_COMPARED) and functions[index - count] == functions[last - count]
    ):
        count += 1
    return count


def list_uses(following: list[PastSlice], starts_in_s: float) -> Iterator[KindUse]:
    """List the first uses of kinds by slices that follow one another from a time on.

    The first begins then; each other one has its gap before it.
    """
    seen = set[tuple[str, ...]]()
    for number, one in enumerate(following):
        starts_in_s += one.gap_s if number else 0.0
        request = one.request
        if request.kinds not in seen:
            seen.add(request.kinds)
            yield KindUse(request.instance, list(request.kinds), starts_in_s)
        starts_in_s += one.duration_s
