"""How a step's sequences spread over micro-batches, which all take as long as the fullest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace

from meshrl.common.hardware.zebra.profile import CostCurve, refused


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of a step, each with the lengths of its sequences in tokens."""

    micros: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Of the micro-batch that has most of them."""
        return max(map(sum, self.micros))

    def seconds(self, curve: CostCurve) -> float:
        """Of the micro-batch that takes longest, by a curve over a sequence's length."""
        known = {length: curve.of(length) for micro in self.micros for length in micro}
        return max(sum(known[length] for length in micro) for micro in self.micros)


def spread(lengths: Mapping[int, int], micros: int, curve: CostCurve) -> Batches | None:
    """So many micro-batches of sequences by length (length: how many of it), as even by the curve
    as the longest first makes them (Graham 1969). None where there are fewer sequences.
    """
    if sum(lengths.values()) < micros:
        return None
    bins: list[tuple[float, int]] = [(0.0, number) for number in range(micros)]
    heapify(bins)
    found: list[list[int]] = [[] for _ in range(micros)]
    for length in sorted(lengths, reverse=True):
        seconds = curve.of(length)
        for _ in range(lengths[length]):
            full, number = bins[0]
            found[number].append(length)
            heapreplace(bins, (full + seconds, number))
    return Batches(tuple(map(tuple, found)))


def checked(lengths: Mapping[int, int]) -> int:
    """All tokens of sequences by length. ConfigError where there are none."""
    if any(length < 1 or count < 0 for length, count in lengths.items()):
        raise refused(f"sequences by length are {dict(lengths)}", "give counts of lengths from 1")
    tokens = sum(length * count for length, count in lengths.items())
    if not tokens:
        raise refused("a step has no sequences", "give how many there are of each length")
    return tokens
