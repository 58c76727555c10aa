"""Correction of predictions by observations: one factor per model, kind of accelerator and role. A
factor is the geometric mean of observed over predicted, with exponential decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

DECAY = 0.9  # weight of an observation relative to the next: about ten are remembered
MAX_KEYS = 256  # maximum number of factors; the one observed longest ago is dropped
MAX_LOG_RATIO = math.log(100.0)  # limit of the ratio of an observation to its prediction


class CorrectionKey(NamedTuple):
    """Key of a correction factor."""

    model: str
    kind: str
    role: str


@dataclass(frozen=True, slots=True)
class CorrectionFactor:
    """Correction factor of a key. Means are of natural logarithms over `count` observations,
    weighed by `DECAY`.
    """

    log_ratio: float = 0.0  # of observed over predicted
    log_error: float = 0.0  # absolute, of observed over the prediction with the factor before
    count: int = 0

    @property
    def value(self) -> float:
        """Factor that multiplies a prediction."""
        return math.exp(self.log_ratio)

    def observe(self, predicted: float, observed: float) -> CorrectionFactor:
        """Return the factor after one more observation."""
        found = math.log(observed) - math.log(predicted)
        found = max(-MAX_LOG_RATIO, min(found, MAX_LOG_RATIO))
        weight = max(1.0 / (self.count + 1), 1.0 - DECAY)
        missed = abs(found - self.log_ratio)
        return CorrectionFactor(
            self.log_ratio + weight * (found - self.log_ratio),
            self.log_error + weight * (missed - self.log_error),
            self.count + 1,
        )


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors of all keys; an immutable value, stored with the planner's memory."""

    # latest observed last
    factors: Mapping[CorrectionKey, CorrectionFactor] = field(default_factory=dict)

    def correct(self, key: CorrectionKey, seconds: float) -> float:
        """Return a prediction of the cost model, corrected."""
        return seconds * self.get_factor(key).value

    def get_factor(self, key: CorrectionKey) -> CorrectionFactor:
        """Return the factor of a key; 1 without an observation."""
        return self.factors.get(key, CorrectionFactor())

    def compute_error(self, key: CorrectionKey) -> float:
        """Return the mean relative error of corrected predictions; 0 without an observation."""
        return math.expm1(self.get_factor(key).log_error)

    def observe(self, key: CorrectionKey, predicted: float, observed: float) -> Correction:
        """Return the correction after an observation. `predicted` is the uncorrected prediction.
        Ignore values that are not positive and finite.
        """
        if not (0 < predicted < math.inf and 0 < observed < math.inf):
            return self
        others = {one: factor for one, factor in self.factors.items() if one != key}
        retained = list(others.items())[-(MAX_KEYS - 1) :]
        return Correction(dict(retained) | {key: self.get_factor(key).observe(predicted, observed)})
