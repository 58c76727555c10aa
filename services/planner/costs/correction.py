"""Corrects predictions by what was observed: a factor for each (model, kind of accelerator, role),
the geometric mean of observed over predicted, in which old observations fade.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

DECAY = 0.9  # weight of an observation beside the next: ten are remembered
MAX_KEYS = 256  # that are kept; who was observed longest ago goes first
MAX_LOG_RATIO = math.log(100.0)  # an observation further from its prediction counts as this far


class CorrectionKey(NamedTuple):
    """What has a factor of its own."""

    model: str
    kind: str
    role: str


@dataclass(frozen=True, slots=True)
class CorrectionFactor:
    """What is known of a key. Means are of natural logarithms, over `count` observations of which
    as many as `FORGETTING` says weigh.
    """

    log: float = 0.0  # of observed over predicted
    error: float = 0.0  # of observed over what was predicted with the factor before, its size
    count: int = 0

    @property
    def value(self) -> float:
        """By which a prediction is multiplied."""
        return math.exp(self.log)

    def observe(self, predicted: float, observed: float) -> CorrectionFactor:
        """The factor after one more observation."""
        found = math.log(observed) - math.log(predicted)
        found = max(-MAX_LOG_RATIO, min(found, MAX_LOG_RATIO))
        weight = max(1.0 / (self.count + 1), 1.0 - DECAY)
        missed = abs(found - self.log)
        return CorrectionFactor(
            self.log + weight * (found - self.log),
            self.error + weight * (missed - self.error),
            self.count + 1,
        )


@dataclass(frozen=True, slots=True)
class Correction:
    """The factors of all keys; a value, which is on record with the planner's memory."""

    factors: Mapping[CorrectionKey, CorrectionFactor] = field(
        default_factory=dict
    )  # latest observed last

    def correct(self, key: CorrectionKey, seconds: float) -> float:
        """A prediction of the cost model as it is to be believed."""
        return seconds * self.get_factor(key).value

    def get_factor(self, key: CorrectionKey) -> CorrectionFactor:
        """What is known of a key; 1 without an observation."""
        return self.factors.get(key, CorrectionFactor())

    def compute_error(self, key: CorrectionKey) -> float:
        """How far corrected predictions have been off, as a share of them; 0 when nothing was
        observed.
        """
        return math.expm1(self.get_factor(key).error)

    def observe(self, key: CorrectionKey, predicted: float, observed: float) -> Correction:
        """The correction after `observed` where the cost model itself, without a factor, had
        `predicted`; the same where either is no time.
        """
        if not (0 < predicted < math.inf and 0 < observed < math.inf):
            return self
        others = {one: factor for one, factor in self.factors.items() if one != key}
        kept = list(others.items())[-(MAX_KEYS - 1) :]
        return Correction(dict(kept) | {key: self.get_factor(key).observe(predicted, observed)})
