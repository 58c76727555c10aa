"""Distribution of a step's sequences over micro-batches, which all take as long as the fullest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace

from meshrl.common.hardware.zebra.profile import CostCurve, profile_error


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches of a step, each with the lengths of its sequences in tokens."""

    lengths: tuple[tuple[int, ...], ...]

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the largest micro-batch."""
        return max(map(sum, self.lengths))

    def compute_max_s(self, curve: CostCurve) -> float:
        """Return the seconds of the slowest micro-batch, by a curve over a sequence's length."""
        known = {length: curve.interpolate_s(length) for micro in self.lengths for length in micro}
        return max(sum(known[length] for length in micro) for micro in self.lengths)


def pack_micro_batches(
    lengths: Mapping[int, int], micro_batches: int, curve: CostCurve
) -> MicroBatches | None:
    """Return `micro_batches` micro-batches of sequences by length (length: count).

    Sequences are balanced by the curve, longest first (Graham 1969). None if there are fewer
    sequences.
    """
    if sum(lengths.values()) < micro_batches:
        return None
    bins: list[tuple[float, int]] = [(0.0, number) for number in range(micro_batches)]
    heapify(bins)
    found: list[list[int]] = [[] for _ in range(micro_batches)]
    for length in sorted(lengths, reverse=True):
        seconds = curve.interpolate_s(length)
        for _ in range(lengths[length]):
            full, number = bins[0]
            found[number].append(length)
            heapreplace(bins, (full + seconds, number))
    return MicroBatches(tuple(map(tuple, found)))


def count_tokens(lengths: Mapping[int, int]) -> int:
    """Return the number of tokens of sequences by length; ConfigError if there are none."""
    if any(length < 1 or count < 0 for length, count in lengths.items()):
        raise profile_error(
            f"sequences by length are {dict(lengths)}", "Set counts for lengths of 1 or more"
        )
    tokens = sum(length * count for length, count in lengths.items())
    if not tokens:
        raise profile_error("a step has no sequences", "Set the number of sequences of each length")
    return tokens
