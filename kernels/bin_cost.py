"""Cost model of bins: linear and quadratic in the lengths of their sequences.

Matrices cost the same for every token, causal attention grows with a sequence's length squared, and
each bin pays for its dispatch. The shares depend on model and machine. They are learned from
measured bins by recursive least squares (Plackett 1950) with slow forgetting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORGETTING_FACTOR = 0.99  # weight of a bin relative to the next: a memory of 100 bins
INITIAL_VARIANCE = 100.0  # initial variance, in squares of the prior
OUTLIER_RATIO = 3.0  # ratio to the expected cost: another process had the processor; not learned
MIN_BINS_FOR_OUTLIERS = 20  # bins from which on outliers are rejected
OUTLIERS_BEFORE_RESET = 5  # outliers in a row after which the machine counts as changed


@dataclass(frozen=True)
class BinCost:
    """Terms of a bin's cost, in seconds or any unit.

    `token` is for each token, `square` for each square of a sequence's length, `bin` for each bin.
    """

    per_token: float = 1.0
    per_square: float = 0.0
    per_bin: float = 0.0

    def estimate_sequence(self, length: int) -> float:
        """Return the cost that a sequence adds to its bin."""
        return self.per_token * length + self.per_square * length * length

    def estimate_bin(self, lengths: Sequence[int]) -> float:
        """Return the cost of a bin; 0 without sequences."""
        return self.per_bin + sum(map(self.estimate_sequence, lengths)) if lengths else 0.0


def estimate_from_flops(num_parameters: int, attention_width: int, num_layers: int) -> BinCost:
    """Estimate the cost of an unmeasured decoder in floating-point operations.

    It is 6 a token and parameter (Kaplan et al. 2020), and 6 a pair of causal tokens and feature of
    all heads (`attention_width`).
    """
    return BinCost(per_token=6.0 * num_parameters, per_square=6.0 * attention_width * num_layers)


class CostCalibration:
    """Calibration of a cost in any unit to seconds, from measured bins."""

    def __init__(self, prior: BinCost, typical_tokens: int) -> None:
        """Initialize; `typical_tokens` is a bin's budget, which scales the learned terms."""
        self._prior_cost, self._typical_tokens = prior, float(typical_tokens)
        self._scale: NDArray[np.float64] | None = None  # seconds of each term, from the first bin
        self._corrections = np.ones(3)  # correction of each term, fitted to the measured bins
        self._variance = np.eye(3) * INITIAL_VARIANCE
        self.num_bins = 0  # bins learned from
        self._outliers_in_a_row = 0  # latest bins that were outliers

    def get_cost(self) -> BinCost:
        """Return the cost in seconds as far as known; before the first bin, the prior."""
        if self._scale is None:
            return self._prior_cost
        token, square, bin = (float(x) for x in self._scale * np.maximum(self._corrections, 0.0))
        if token <= 0 and square <= 0:  # the bins were too similar to separate the terms
            token, square, bin = (float(x) for x in self._scale)
        return BinCost(token / self._typical_tokens, square / self._typical_tokens**2, bin)

    def add_measurement(self, lengths: Sequence[int], seconds: float) -> None:
        """Add the measured seconds of a bin with sequences of these lengths."""
        if not lengths or not np.isfinite(seconds) or seconds <= 0:
            return
        sizes = np.asarray(lengths, np.float64) / self._typical_tokens
        terms = np.array([sizes.sum(), np.square(sizes).sum(), 1.0])
        if self._scale is None:
            # The prior's terms, scaled to the seconds of this first bin. If the prior has no cost
            # for a bin itself, it is a tenth of a full one.
            prior, size = self._prior_cost, self._typical_tokens
            shares = np.array([prior.per_token * size, prior.per_square * size**2, prior.per_bin])
            shares[1:] = np.maximum(shares[1:], (1e-3 * shares[0], 0.1 * shares[0]))
            self._scale = shares * seconds / float(shares @ terms)
        row = terms * self._scale / seconds  # fits relative errors, not seconds
        guess = float(row @ self._corrections)
        if self.num_bins >= MIN_BINS_FOR_OUTLIERS and 0 < guess < 1 / OUTLIER_RATIO:
            self._outliers_in_a_row += 1
            if self._outliers_in_a_row < OUTLIERS_BEFORE_RESET:
                return
            self._variance = np.eye(3) * INITIAL_VARIANCE
        self._outliers_in_a_row = 0
        gain = self._variance @ row / (FORGETTING_FACTOR + row @ self._variance @ row)
        self._corrections = self._corrections + gain * (1.0 - guess)
        variance = (self._variance - np.outer(gain, row @ self._variance)) / FORGETTING_FACTOR
        # Directions that no bin determines must not grow without bound through forgetting.
        self._variance = variance * min(1.0, INITIAL_VARIANCE / float(np.diagonal(variance).max()))
        self.num_bins += 1
