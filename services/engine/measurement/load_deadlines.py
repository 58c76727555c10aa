"""Deadlines of loading weights, from their bytes and from measured rates."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.base.clock import Clock

# Slowest rate that is not taken for a hang before the first measurement: a host whose processors
# are shared reaches several times as much.
SLOWEST_BYTES_PER_S = 50e6
MARGIN = 4.0  # a load may take this many times as long as the earlier ones


def compute_load_deadline_s(
    size_bytes: int, floor_s: float, predicted_s: float | None = None
) -> float:
    """Return the seconds in which weights must be loaded.

    Args:
        floor_s: Seconds for all that does not depend on the bytes.
        predicted_s: Duration by the measured rate; None: no rate is known.
    """
    declared_s = size_bytes / SLOWEST_BYTES_PER_S
    return floor_s + (declared_s if predicted_s is None else min(declared_s, MARGIN * predicted_s))


@dataclass(frozen=True)
class Deadline:
    """Instant by which several calls must have ended together."""

    clock: Clock
    until_s: float  # by the monotonic clock

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Deadline:
        """Return the deadline in `seconds`."""
        return cls(clock, clock.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds that remain, 0 at least."""
        return max(0.0, self.until_s - self.clock.monotonic())
