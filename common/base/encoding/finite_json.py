"""JSON with finite numbers alone: `json` reads NaN, Infinity and 1e999 as floats of Python."""

from __future__ import annotations

import json
import math
from typing import Any


class NotFinite(ValueError):
    """A number in JSON that is not finite; the message is the number as written."""


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise NotFinite(written)
    return number


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def is_finite(value: Any) -> bool:
    """True if all numbers of a value that JSON can hold are finite."""
    try:
        json.dumps(value, allow_nan=False)
    except (RecursionError, TypeError, ValueError):
        return False
    return True
