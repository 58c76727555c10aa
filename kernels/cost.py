"""The cost model of bins: linear and quadratic in the lengths of their sequences.

Matrices cost the same for every token, causal attention grows with a sequence's length squared,
and each bin pays for its dispatch. Which share each has depends on model and machine: it is learned
from bins as they are computed, by recursive least squares (Plackett 1950) that forget slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORGETTING = 0.99  # weight of a bin beside the next: 100 bins are remembered
UNSURE = 100.0  # variance of what is not known yet, in squares of the prior
OUTLIER = 3.0  # times what was expected: something else had the processor; not learned
KNOWN = 20  # bins, from which on there are outliers
PATIENCE = 5  # outliers in a row: it is the machine that has changed


@dataclass(frozen=True)
class BinCost:
    """The terms of a bin's cost, in seconds or any unit: `token` for each token, `square` for each
    square of a sequence's length, `bin` for each bin.
    """

    token: float = 1.0
    square: float = 0.0
    bin: float = 0.0

    def sequence(self, length: int) -> float:
        """What a sequence adds to its bin."""
        return self.token * length + self.square * length * length

    def of(self, lengths: Sequence[int]) -> float:
        """The cost of a bin; one without sequences costs nothing."""
        return self.bin + sum(map(self.sequence, lengths)) if lengths else 0.0


def expected(parameters: int, attention_width: int, layers: int) -> BinCost:
    """The cost of a decoder that nobody has measured, in floating-point operations: 6 a token and
    parameter (Kaplan et al. 2020), 6 a pair of causal tokens and feature of all heads
    (`attention_width`).
    """
    return BinCost(token=6.0 * parameters, square=6.0 * attention_width * layers)


class Calibration:
    """Turns a cost in any unit into seconds, from measured bins."""

    def __init__(self, prior: BinCost, typical_tokens: int) -> None:
        """`typical_tokens` is a bin's budget: what is learned is scaled by it."""
        self._prior, self._tokens = prior, float(typical_tokens)
        self._scale: NDArray[np.float64] | None = None  # seconds of each term, from the first bin
        self._factor = np.ones(3)  # correction of each term, fitted to the measured bins
        self._variance = np.eye(3) * UNSURE
        self.seen = 0  # bins learned from
        self._in_a_row = 0  # latest bins that were not

    def cost(self) -> BinCost:
        """Return the cost in seconds as far as it is known; before the first bin the prior."""
        if self._scale is None:
            return self._prior
        token, square, bin = (float(x) for x in self._scale * np.maximum(self._factor, 0.0))
        if token <= 0 and square <= 0:  # bins were too much alike to tell their terms apart
            token, square, bin = (float(x) for x in self._scale)
        return BinCost(token / self._tokens, square / self._tokens**2, bin)

    def learn(self, lengths: Sequence[int], seconds: float) -> None:
        """Takes in that a bin with sequences of these lengths took so many seconds."""
        if not lengths or not np.isfinite(seconds) or seconds <= 0:
            return
        sizes = np.asarray(lengths, np.float64) / self._tokens
        terms = np.array([sizes.sum(), np.square(sizes).sum(), 1.0])
        if self._scale is None:
            # The prior's terms in seconds, such that they give this first bin; a bin costs a tenth
            # of a full one if the prior does not say.
            prior, size = self._prior, self._tokens
            shares = np.array([prior.token * size, prior.square * size**2, prior.bin])
            shares[1:] = np.maximum(shares[1:], (1e-3 * shares[0], 0.1 * shares[0]))
            self._scale = shares * seconds / float(shares @ terms)
        row = terms * self._scale / seconds  # relative errors count, not seconds
        guess = float(row @ self._factor)
        if self.seen >= KNOWN and 0 < guess < 1 / OUTLIER:
            self._in_a_row += 1
            if self._in_a_row < PATIENCE:
                return
            self._variance = np.eye(3) * UNSURE
        self._in_a_row = 0
        gain = self._variance @ row / (FORGETTING + row @ self._variance @ row)
        self._factor = self._factor + gain * (1.0 - guess)
        variance = (self._variance - np.outer(gain, row @ self._variance)) / FORGETTING
        # What no bin tells apart must not grow for ever while the rest is forgotten.
        self._variance = variance * min(1.0, UNSURE / float(np.diagonal(variance).max()))
        self.seen += 1
