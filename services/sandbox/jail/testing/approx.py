"""pytest's `approx`: numbers, and lists, tuples and dicts of them, equal within a tolerance."""

from __future__ import annotations

import math
import sys
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-12  # pytest's own


class Approx:
    """Equal to what is close to `expected`; the solution has no say in it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False
    ) -> None:
        self._expected, self._relative = expected, rel
        self._absolute, self._nan_ok = abs, nan_ok

    def __eq__(self, found: Any) -> bool:
        wanted = self._expected
        if isinstance(wanted, dict):
            return (
                isinstance(found, dict)
                and wanted.keys() == found.keys()
                and all(self._close(wanted[key], found[key]) for key in wanted)
            )
        if isinstance(wanted, (list, tuple)):
            return (
                isinstance(found, (list, tuple))
                and len(wanted) == len(found)
                and all(self._close(*pair) for pair in zip(wanted, found))
            )
        return self._close(wanted, found)

    def _close(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, bool) != isinstance(found, bool):
            return False
        if not _is_number(wanted) or not _is_number(found):
            return bool(wanted == found)
        if wanted == found:
            return True
        if wanted != wanted:
            return self._nan_ok and found != found
        if not isinstance(wanted, complex) and math.isinf(wanted):
            return False
        exact = type(wanted) if type(wanted).__name__ == "Decimal" else float
        tolerance = exact(str(ABSOLUTE)) if self._absolute is None else self._absolute
        if self._relative is not None or self._absolute is None:
            relative = exact(str(RELATIVE)) if self._relative is None else self._relative
            tolerance = max(relative * abs(wanted), tolerance)
        return bool(abs(wanted - found) <= tolerance)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"


def _is_number(value: Any) -> bool:
    numbers, decimal = sys.modules.get("numbers"), sys.modules.get("decimal")
    if numbers is not None and type(value).__name__ == "Fraction":
        return True
    known = () if decimal is None else (decimal.Decimal,)
    return isinstance(value, (int, float, complex)) or type(value) in known
