"""Cost curve of an engine's decode step, fitted while the engine runs.

Its terms are a constant, the sequences, the tokens of their contexts, and the prompt tokens that
are computed beside. The fit is least squares of relative errors with fading weights: ridge
regression towards a prior (Hoerl and Kennard 1970) with no negative coefficient (Lawson and Hanson
1974). If the number of sequences never changes, the terms cannot be separated; the prior then
attributes a step mostly to the constant, as reading all weights once does. The ratio of the terms
is remembered for long. The common level follows within seconds, because it changes when other
processes use the same cores.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.state.pool.demand.measurements import DecodeCurve

WINDOW_STEPS = 8  # steps of one window, because arrival times of tokens are not exact to a step
MIN_WINDOWS = 4  # windows that a curve needs
DECAY = 0.998  # weight of a window relative to the next: some 4,000 steps separate the terms
LEVEL_TIME_CONSTANT_S = 10.0  # computing time that determines the level of all terms
STALL_S = 0.1  # no outlier: other processes had the processor and will have it again
# Larger ratios to the expected time are clipped to this: code is compiled, or the host stalls.
OUTLIER_FACTOR = 10.0
# From this window on, windows between two fits, because a fit takes a third of a millisecond.
SOLVE_EVERY = 16
# prior: shares of a step's time, in the order of the terms
PRIOR_SHARES = np.array([0.8, 0.1, 0.1, 0.1])
PRIOR_WINDOWS = 0.3  # weight of the prior in windows
TERM_SUBSETS = [list(some) for n in range(1, 5) for some in combinations(range(4), n)]

Floats = NDArray[np.float64]


class CurveFit:
    """Fit of the measurements of each call of an engine's `step`.

    `get_curve` returns its result.
    """

    def __init__(self) -> None:
        self._window, self._seconds, self._steps = np.zeros(4), 0.0, 0
        self._squares, self._sums, self._weight = np.zeros((4, 4)), np.zeros(4), 0.0
        self._measured_s = self._expected_s = 0.0  # for the level
        self._terms = np.zeros(4)  # seconds of each term
        self._windows = self.steps = 0

    def add_steps(
        self,
        steps: int,
        sampled_tokens: int,
        context_tokens: float,
        prefilled_tokens: int,
        seconds: float,
    ) -> None:
        """Add `steps` steps that took `seconds`.

        They sampled `sampled_tokens` tokens of sequences with `context_tokens` tokens in all, and
        computed `prefilled_tokens` tokens of prompts. Each may be 0.
        """
        decoded = steps if sampled_tokens or not prefilled_tokens else 0
        self._window += (decoded, sampled_tokens, decoded * context_tokens, prefilled_tokens)
        self._seconds += seconds
        self._steps += max(steps, 0)
        if self._steps >= WINDOW_STEPS:
            terms, took_s, many = self._window, self._seconds, self._steps
            self._window, self._seconds, self._steps = np.zeros(4), 0.0, 0
            if took_s > 0 and terms.any():
                self._add_window(terms, took_s, many)

    def get_curve(self, kind: str, tensor_parallel_size: int) -> DecodeCurve | None:
        """Return the curve for an accelerator kind and tensor-parallel size, or None if unknown."""
        if self._windows < MIN_WINDOWS or not self._terms[:3].any():
            return None
        base, sequence, context, prefill = (float(x) for x in self._terms * self._level)
        rate = 1 / prefill if prefill > 0 else 0.0
        return DecodeCurve(kind, tensor_parallel_size, base, sequence, context, rate, self.steps)

    @property
    def _level(self) -> float:
        return self._measured_s / self._expected_s if self._expected_s > 0 else 1.0

    def _add_window(self, terms: Floats, took_s: float, steps: int) -> None:
        expected_s = float(terms @ self._terms)
        if self._windows >= MIN_WINDOWS and expected_s > 0:
            most_s = OUTLIER_FACTOR * expected_s * max(1.0, self._level)
            took_s = min(took_s, max(most_s, STALL_S))
        row = terms / took_s
        self._squares = DECAY * self._squares + np.outer(row, row)
        self._sums = DECAY * self._sums + row
        self._weight = DECAY * self._weight + 1
        self._windows += 1
        self.steps += steps
        if self._windows < SOLVE_EVERY or self._windows % SOLVE_EVERY == 0:
            self._terms = _solve(self._squares, self._sums, self._weight)
        fade = math.exp(-took_s / LEVEL_TIME_CONSTANT_S)
        self._measured_s = fade * self._measured_s + took_s
        self._expected_s = fade * self._expected_s + float(terms @ self._terms)


def _solve(squares: Floats, sums: Floats, weight: float) -> Floats:
    """Return the seconds of each term, none negative; 0 for a term that never occurred."""
    size = np.sqrt(np.diagonal(squares) / weight)  # scales seconds of a term to its share of a step
    has_occurred = size > 0
    size = np.where(has_occurred, size, 1.0)
    matrix = squares / np.outer(size, size) + PRIOR_WINDOWS * np.eye(4)
    right = sums / size + PRIOR_WINDOWS * PRIOR_SHARES
    best, least = np.zeros(4), 0.0
    for some in TERM_SUBSETS:
        if not has_occurred[some].all():
            continue
        found = np.zeros(4)
        found[some] = np.linalg.solve(matrix[np.ix_(some, some)], right[some])
        if (found < 0).any():
            continue
        loss = float(found @ matrix @ found - 2 * right @ found)
        if loss < least:
            best, least = found, loss
    return best / size
