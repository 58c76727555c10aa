"""JSON with finite numbers only: `json` reads NaN, Infinity and 1e999 as Python floats."""

from __future__ import annotations

import json
import math
from typing import Any


class NonFiniteNumber(ValueError):
    """Error raised for a JSON number that is not finite; the message is the number as written."""


def _parse_finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise NonFiniteNumber(written)
    return number


DECODER = json.JSONDecoder(parse_constant=_parse_finite, parse_float=_parse_finite)


def is_finite(value: Any) -> bool:
    """Return True if all numbers of a JSON value are finite."""
    try:
        json.dumps(value, allow_nan=False)
    except (RecursionError, TypeError, ValueError):
        return False
    return True
