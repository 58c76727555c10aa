"""What changes along a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drift:
    """A quantity that grows from the first version of the weights to the last."""

    first: float
    last: float

    def at(self, share: float) -> float:
        """Its value when so much of the run is over, 0 to 1."""
        return self.first + (self.last - self.first) * min(1.0, max(0.0, share))
