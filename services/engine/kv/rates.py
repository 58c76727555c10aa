"""What loading and copying take, and how often what was kept is used: measured, so that bytes are
moved only where that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.8  # of what was measured before, at each further measurement
FRESH = 32  # chunks of a kind that are kept to learn whether they are used
TRIED = 16  # one in so many is kept where it does not pay, to see whether that has changed


class LoadingPace:
    """Seconds that a byte takes: a running mean."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    @property
    def per_byte(self) -> float:
        """Seconds for each byte; 0: not measured."""
        return self._seconds / self._bytes if self._bytes else 0.0

    def add(self, size: int, seconds: float) -> None:
        self._bytes = FADE * self._bytes + size
        self._seconds = FADE * self._seconds + seconds


@dataclass
class Worth:
    """Whether chunks of one kind are worth their copies."""

    kept: float = 0.0  # chunks, the older ones counting less
    used: float = 0.0  # of them
    _passed: int = 0

    def pays(self, saved_s: float, cost_s: float) -> bool:
        """Whether a chunk is kept that saves so many seconds if it is used, and costs so many to be
        copied; 0: it is not measured, and may save anything.
        """
        if self.kept < FRESH or not saved_s or self.chance * saved_s > cost_s:
            return True
        self._passed += 1
        return self._passed % TRIED == 0

    @property
    def chance(self) -> float:
        return min(1.0, self.used / self.kept) if self.kept else 1.0

    def was_kept(self) -> None:
        if self.kept >= 64 * FRESH:  # what was long ago counts less
            self.kept, self.used = self.kept / 2, self.used / 2
        self.kept += 1

    def was_used(self) -> None:
        self.used += 1
