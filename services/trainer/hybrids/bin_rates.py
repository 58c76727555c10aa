"""Tokens a second that bins are trained at, by how many tokens they have."""

from __future__ import annotations

WEIGHT = 0.1  # a new bin's share in the mean of its class


class BinRates:
    """A running mean for each power of two of a bin's tokens."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def add(self, tokens: int, tokens_per_s: float) -> None:
        """A bin of so many tokens was trained at this rate."""
        if tokens > 0:
            size = 1 << (tokens.bit_length() - 1)
            mean = self._means.get(size, tokens_per_s)
            self._means[size] = mean + WEIGHT * (tokens_per_s - mean)

    @property
    def table(self) -> dict[str, float]:
        """The means, by the fewest tokens of their class."""
        return {str(size): round(self._means[size], 1) for size in sorted(self._means)}
