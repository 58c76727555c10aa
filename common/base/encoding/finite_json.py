"""JSON with finite numbers alone: `json` reads NaN, Infinity and 1e999 as floats of Python."""

from __future__ import annotations

import json
import math
from typing import Any


class NonFiniteNumber(ValueError):
    """A number in JSON that is not finite; the message is the number as written."""


def _parse_finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise NonFiniteNumber(written)
    return number


DECODER = json.JSONDecoder(parse_constant=_parse_finite, parse_float=_parse_finite)


def is_finite(value: Any) -> bool:
    """True if all numbers of a value that JSON can hold are finite."""
    try:
        json.dumps(value, allow_nan=False)
    except (RecursionError, TypeError, ValueError):
        return False
    return True
