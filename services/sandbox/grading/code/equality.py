"""Whether what a program printed or a function returned is what was wanted.

Whole numbers are compared as whole numbers, with no tolerance. A tolerance holds only where a
number with a point or an exponent is wanted, and where one of the two is no whole number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from meshrl.services.sandbox.jail.wire import plain

WHOLE = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
LONGEST = 1_000  # characters of a word that is read as a number with a tolerance
EXACT = 2**53  # whole floats below it are as exact as integers


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be off: `relative` to the larger of the two, or `absolute`, whichever
    allows more.
    """

    relative: float = 1e-6  # what most statements of problems ask for; pytest.approx has it too
    absolute: float = 1e-9  # near zero, where a relative one allows nothing

    @classmethod
    def of(cls, options: dict[str, Any]) -> Tolerance:
        """That of a job's options."""
        relative = options.get("rel_tol", cls.relative)
        return cls(float(relative), float(options.get("abs_tol", cls.absolute)))

    def close(self, found: float, wanted: float) -> bool:
        """Whether they are equal but for rounding. Two different whole numbers never are, as long
        as floats are dense enough to tell them apart.
        """
        if found == wanted or (math.isnan(found) and math.isnan(wanted)):
            return True
        if all(abs(number) < EXACT and number == int(number) for number in (found, wanted)):
            return False
        return math.isclose(found, wanted, rel_tol=self.relative, abs_tol=self.absolute)


def same_text(found: str, wanted: str, tolerance: Tolerance) -> bool:
    """Whether the words of two texts are the same, one by one; numbers with a point may be off by
    the tolerance.
    """
    said, due = found.split(), wanted.split()
    if len(said) != len(due):
        return False
    return all(a == b or _same_number(a, b, tolerance) for a, b in zip(said, due, strict=True))


def _same_number(found: str, wanted: str, tolerance: Tolerance) -> bool:
    if WHOLE.fullmatch(wanted) or max(len(found), len(wanted)) > LONGEST:
        return False  # 5.0 is not 5, and 05 is not
    numbers = NUMBER.fullmatch(wanted) and NUMBER.fullmatch(found)
    return bool(numbers) and tolerance.close(float(found), float(wanted))


def same(found: Any, wanted: Any, tolerance: Tolerance) -> bool:
    """Equality of JSON values, as Python's `==` has it but for three: floats may be off where one
    is wanted, true is not 1, and NaN equals NaN. `found` may hold integers as `plain` packs them.
    """
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, int | float):
        number = plain.number(found)
        if number is None:
            return False
        if isinstance(wanted, int):
            return bool(number == wanted)
        try:
            return tolerance.close(number, wanted)
        except OverflowError:  # a whole number beyond all floats
            return False
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(
            same(a, b, tolerance) for a, b in zip(found, wanted, strict=True)
        )
    if isinstance(wanted, dict) and isinstance(found, dict):
        return wanted.keys() == found.keys() and all(
            same(found[key], wanted[key], tolerance) for key in wanted
        )
    return type(found) is type(wanted) and bool(found == wanted)
