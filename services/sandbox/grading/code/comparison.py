"""Comparison of a program's output, or a function's value, with the expected one.

Whole numbers are compared without a tolerance. A tolerance holds only where a number with a point
or an exponent is expected, and where one of the two is no whole number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from meshrl.services.sandbox.jail.wire import plain_data

INTEGER_PATTERN = re.compile(r"[+-]?[0-9]+")
NUMBER_PATTERN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
MAX_NUMBER_CHARACTERS = 1_000  # characters of a word that is read as a number with a tolerance
MAX_EXACT_FLOAT = 2**53  # whole floats below it are as exact as integers


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of numbers.

    It is `relative` to the larger of the two, or `absolute`, whichever allows more.
    """

    relative: float = 1e-6  # as in most problem statements; also of pytest.approx
    absolute: float = 1e-9  # near zero, where a relative one allows nothing

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Tolerance:
        """Read the tolerance of a job's options."""
        relative = options.get("rel_tol", cls.relative)
        return cls(float(relative), float(options.get("abs_tol", cls.absolute)))

    def is_close(self, found: float, expected: float) -> bool:
        """Return whether two numbers are equal but for rounding.

        Two different whole numbers never are, as long as floats are dense enough to tell them
        apart.
        """
        if found == expected or (math.isnan(found) and math.isnan(expected)):
            return True
        if all(
            abs(number) < MAX_EXACT_FLOAT and number == int(number) for number in (found, expected)
        ):
            return False
        return math.isclose(found, expected, rel_tol=self.relative, abs_tol=self.absolute)


def is_same_text(found: str, expected: str, tolerance: Tolerance) -> bool:
    """Return whether two texts have the same words; numbers with a point have the tolerance."""
    found_words, expected_words = found.split(), expected.split()
    if len(found_words) != len(expected_words):
        return False
    return all(
        a == b or _is_same_number(a, b, tolerance)
        for a, b in zip(found_words, expected_words, strict=True)
    )


def _is_same_number(found: str, expected: str, tolerance: Tolerance) -> bool:
    if (
        INTEGER_PATTERN.fullmatch(expected)
        or max(len(found), len(expected)) > MAX_NUMBER_CHARACTERS
    ):
        return False  # 5.0 is not 5, and 05 is not
    numbers = NUMBER_PATTERN.fullmatch(expected) and NUMBER_PATTERN.fullmatch(found)
    return bool(numbers) and tolerance.is_close(float(found), float(expected))


def is_equal(found: Any, expected: Any, tolerance: Tolerance) -> bool:
    """Compare JSON values as Python's `==` does, with three exceptions.

    Floats have the tolerance where one is expected, true is not 1, and NaN equals NaN. `found` may
    hold integers as `plain_data` packs them.
    """
    if isinstance(expected, bool) or isinstance(found, bool):
        return found is expected
    if isinstance(expected, int | float):
        number = plain_data.decode_number(found)
        if number is None:
            return False
        if isinstance(expected, int):
            return bool(number == expected)
        try:
            return tolerance.is_close(number, expected)
        except OverflowError:  # a whole number beyond all floats
            return False
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(
            is_equal(a, b, tolerance) for a, b in zip(found, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(
            is_equal(found[key], expected[key], tolerance) for key in expected
        )
    return type(found) is type(expected) and bool(found == expected)
