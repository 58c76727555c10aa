"""What changes along a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearDrift:
    """A quantity that grows from the first version of the weights to the last."""

    initial: float
    final: float

    def get_value(self, progress: float) -> float:
        """Its value when so much of the run is over, 0 to 1."""
        return self.initial + (self.final - self.initial) * min(1.0, max(0.0, progress))
