"""What loading and copying take, and how often what was kept is used: measured, so that bytes are
moved only where that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.8  # of what was measured before, at each further measurement
MIN_CHUNKS = 32  # chunks of a kind that are kept to learn whether they are used
PROBE_EVERY = 16  # one in so many is kept where it does not pay, to see whether that has changed


class TransferRate:
    """Seconds that a byte takes: a running mean."""

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
    """Whether chunks of one kind are worth their copies."""

    offloaded: float = 0.0  # chunks, the older ones counting less
    reused: float = 0.0  # of them
    _skipped: int = 0

    def is_worthwhile(self, saved_s: float, cost_s: float) -> bool:
        """Whether a chunk is kept that saves so many seconds if it is used, and costs so many to be
        copied; 0: it is not measured, and may save anything.
        """
        if self.offloaded < MIN_CHUNKS or not saved_s or self.reuse_probability * saved_s > cost_s:
            return True
        self._skipped += 1
        return self._skipped % PROBE_EVERY == 0

    @property
    def reuse_probability(self) -> float:
        return min(1.0, self.reused / self.offloaded) if self.offloaded else 1.0

    def count_offload(self) -> None:
        if self.offloaded >= 64 * MIN_CHUNKS:  # what was long ago counts less
            self.offloaded, self.reused = self.offloaded / 2, self.reused / 2
        self.offloaded += 1

    def count_reuse(self) -> None:
        self.reused += 1
