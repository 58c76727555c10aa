"""Quantities that change along a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearDrift:
    """Quantity that changes linearly from the first version of the weights to the last."""

    initial: float
    final: float

    def get_value(self, progress: float) -> float:
        """Return its value at `progress` of the run, 0 to 1."""
        return self.initial + (self.final - self.initial) * min(1.0, max(0.0, progress))
