"""What an engine's decode step takes, fitted while it runs: so much for itself, for each sequence,
for each token of their contexts, and for each token of a prompt that is computed beside.

Least squares of relative errors with weights that fade (ridge regression towards a prior, Hoerl
and Kennard 1970, with no coefficient below zero, Lawson and Hanson 1974). Where an engine has
always run as many sequences, nothing tells the terms apart: the prior says then that a step costs
mostly for itself, as one that reads all weights once does. How the terms relate is remembered for
long; the level of all of them follows within seconds, as it changes when others come to the same
cores.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from meshrl.common.state.pool.demand.measurements import DecodeCurve

WINDOW_STEPS = 8  # are taken in together: an engine may not tell to a step when a token came
MIN_WINDOWS = 4  # windows before there is a curve
DECAY = 0.998  # weight of a window beside the next: some 4,000 steps tell the terms apart,
LEVEL_TIME_CONSTANT_S = 10.0  # and those of so much computing tell how long they take altogether
STALL_S = 0.1  # is no outlier: others had the processor, and will have it again
OUTLIER_FACTOR = (
    10.0  # times what was expected: code is compiled, the host stands; it counts as so much
)
SOLVE_EVERY = 16  # windows, from so many on: it takes a third of a millisecond
PRIOR_SHARES = np.array(
    [0.8, 0.1, 0.1, 0.1]
)  # of a step's time: the prior, in the order of the terms
PRIOR_WINDOWS = 0.3  # windows that the prior is worth
TERM_SUBSETS = [list(some) for n in range(1, 5) for some in combinations(range(4), n)]

Floats = NDArray[np.float64]


class CurveFit:
    """Takes in what each call of an engine's `step` did; `curve` is what follows from all."""

    def __init__(self) -> None:
        self._window, self._seconds, self._steps = np.zeros(4), 0.0, 0
        self._squares, self._sums, self._weight = np.zeros((4, 4)), np.zeros(4), 0.0
        self._measured_s = self._expected_s = 0.0  # seconds, for the level
        self._terms = np.zeros(4)  # seconds of each
        self._windows = self.steps = 0

    def add_steps(
        self,
        steps: int,
        sampled_tokens: int,
        context_tokens: float,
        prefilled_tokens: int,
        seconds: float,
    ) -> None:
        """`steps` steps sampled so many tokens of sequences with `context` tokens in all, and
        computed `prefilled` tokens of prompts, in `seconds`. All may be 0.
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
        """Of accelerators of a kind, and a degree of tensor parallelism; None: not known yet."""
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
    """Seconds of each term, none below 0; 0 of a term that was never there."""
    size = np.sqrt(np.diagonal(squares) / weight)  # makes a term's share of a step of its seconds
    seen = size > 0
    size = np.where(seen, size, 1.0)
    matrix = squares / np.outer(size, size) + PRIOR_WINDOWS * np.eye(4)
    right = sums / size + PRIOR_WINDOWS * PRIOR_SHARES
    best, least = np.zeros(4), 0.0
    for some in TERM_SUBSETS:
        if not seen[some].all():
            continue
        found = np.zeros(4)
        found[some] = np.linalg.solve(matrix[np.ix_(some, some)], right[some])
        if (found < 0).any():
            continue
        loss = float(found @ matrix @ found - 2 * right @ found)
        if loss < least:
            best, least = found, loss
    return best / size
