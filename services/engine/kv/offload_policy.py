"""Measured costs and benefits of offloading, so that bytes move only where that pays.

It measures the time to load and copy, and how often offloaded chunks are used.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.8  # weight of earlier measurements at each new one
MIN_CHUNKS = 32  # chunks of a kind that are offloaded to measure their use
PROBE_EVERY = 16  # One chunk in this many is offloaded where that does not pay, to detect a change.


class TransferRate:
    """Running mean of the seconds that a byte takes."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    @property
    def s_per_byte(self) -> float:
        """Seconds for each byte; 0: not measured."""
        return self._seconds / self._bytes if self._bytes else 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        self._bytes = DECAY * self._bytes + size_bytes
        self._seconds = DECAY * self._seconds + seconds


@dataclass
class OffloadPolicy:
    """Decision of whether chunks of one kind are worth their copies."""

    offloaded: float = 0.0  # chunks; older ones count less
    reused: float = 0.0  # offloaded chunks that were used again
    _skipped: int = 0

    def is_worthwhile(self, saved_s: float, cost_s: float) -> bool:
        """Return True if a chunk is worth offloading.

        `saved_s`: seconds that it saves if it is used; 0: not measured, so the saving is unknown.
        `cost_s`: seconds that the copy takes.
        """
        if self.offloaded < MIN_CHUNKS or not saved_s or self.reuse_probability * saved_s > cost_s:
            return True
        self._skipped += 1
        return self._skipped % PROBE_EVERY == 0

    @property
    def reuse_probability(self) -> float:
        return min(1.0, self.reused / self.offloaded) if self.offloaded else 1.0

    def count_offload(self) -> None:
        if self.offloaded >= 64 * MIN_CHUNKS:  # old counts fade
            self.offloaded, self.reused = self.offloaded / 2, self.reused / 2
        self.offloaded += 1

    def count_reuse(self) -> None:
        self.reused += 1
