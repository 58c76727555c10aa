"""Validation of numbers that a job's code returns as rewards, equal to the sandbox's."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def to_finite_float(value: Any, name: str) -> float:
    """Return a finite number, also of numpy's types, as float64; True counts as 1.

    Raise TypeError for another type, such as the text of a number; ValueError if it is not finite.
    """
    if not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a finite number, not {value!r:.80}, a {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {value!r:.80}")
    return number
