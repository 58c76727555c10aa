"""When two texts, or two JSON values, count as the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.services.sandbox.grading.code.equality import Tolerance, same, same_text
from meshrl.services.sandbox.jail.wire import plain

NUMBERS = st.floats(allow_nan=False) | st.integers()
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
SMALL = st.floats(0.0, 1e-2)


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
    [
        ("5000001.0", "5000000", False),
        ("5000001.0", "5000000.0", False),
        ("5000001", "5000000.0", False),
        ("5.0", "5", False),
        ("5", "5.0", True),
        ("05", "5", False),
        ("+5", "5", False),
        ("-0", "0", False),
        ("-0.0", "0.0", True),
        ("1.9999999999", "2.0", True),
        ("0.333333", "0.3333333333333333", True),
        ("0.33333", "0.3333333333333333", False),
        ("1e5", "100000.0", True),
        ("100000", "1e5", True),
        ("1e5", "100000", False),
        ("1e-12", "0.0", True),
        ("1e-8", "0.0", False),
        ("nan", "0.5", False),
        ("nan", "nan", True),
        ("inf", "inf", True),
        ("inf", "-inf", False),
        ("inf", "1e308", False),
        ("1_000.5", "1000.5", False),
        ("٣.5", "3.5", False),
        ("yes", "YES", False),
        ("Ω ≠ o", "Ω ≠ o", True),
        ("1 2\r\n3 \n", "1 2\n3", True),
        ("12", "1 2", False),
        ("", " \n", True),
        ("0.5 7", "0.5", False),
        ("3.14.15", "3.14.15", True),
        ("3.14.16", "3.14.15", False),
        ("9" * 4000 + ".5", "9" * 4000 + ".0", False),
    ],
)
def test_words_are_compared(found: str, wanted: str, equal: bool) -> None:
    assert same_text(found, wanted, Tolerance()) is equal


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
    [
        (5.0, 5, True),
        (5000001.0, 5000000, False),
        (5000001.0, 5000000.0, False),
        (5000001, 5000000.0, False),
        (5000000.4, 5000000.0, True),
        (round(((1 + 5**0.5) / 2) ** 80 / 5**0.5), 23416728348467685, False),  # Binet's formula
        (3.0000000000000004, 3, False),
        (float(2**70 + 1), 2**70 + 1, False),
        (1e17 * (1 + 1e-15), 1e17, True),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (10**400, 1.5, False),
        ("5", 5, False),
        (None, 0, False),
        ([], {}, False),
    ],
)
def test_values_are_compared(found: Any, wanted: Any, equal: bool) -> None:
    assert same(plain.jsonable(found), wanted, Tolerance()) is equal


@settings(max_examples=50)
@given(VALUES)
def test_a_value_equals_itself_whatever_it_crosses(value: Any) -> None:
    assert same(plain.jsonable(value), value, Tolerance(0.0, 0.0))


@settings(max_examples=50)
@given(VALUES, VALUES, SMALL, SMALL)
def test_only_values_of_one_kind_are_equal_and_both_ways(
    a: Any, b: Any, relative: float, absolute: float
) -> None:
    def same_kind(x: Any, y: Any) -> bool:
        numbers = (int, float)
        if type(x) in numbers and type(y) in numbers:
            return True
        return type(x) is type(y)

    found = same(plain.jsonable(a), b, Tolerance(relative, absolute))
    if found:
        assert same_kind(a, b)
    if type(a) is type(b) is float:
        assert found == same(b, a, Tolerance(relative, absolute))


@given(NUMBERS, NUMBERS, SMALL, SMALL, SMALL, SMALL)
def test_a_wider_tolerance_accepts_all_that_a_narrow_one_does(
    a: float, b: float, relative: float, absolute: float, more: float, further: float
) -> None:
    narrow = Tolerance(relative, absolute)
    wide = Tolerance(relative + more, absolute + further)
    assert same(plain.jsonable(a), b, wide) or not same(plain.jsonable(a), b, narrow)
    assert same_text(str(a), str(b), wide) or not same_text(str(a), str(b), narrow)


@given(st.integers(), st.integers())
def test_integers_are_exact_at_any_tolerance(a: int, b: int) -> None:
    wide = Tolerance(1.0, 1e30)
    assert same(plain.jsonable(a), b, wide) == (a == b)
    assert same_text(str(a), str(b), wide) == (a == b)


@given(st.integers(), st.floats(0.999, 1.001))
def test_a_rounded_float_is_no_integer(a: int, factor: float) -> None:
    try:
        found = a * factor
    except OverflowError:
        return
    assert same(found, a, Tolerance()) == (found == a)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_how_a_float_is_spelled_is_all_the_same(value: float) -> None:
    spellings = (f"{value!r}", f"{value:.17g}", f"{value:.17e}", f"{value:+.20E}")
    for wanted in (repr(value), f"{value:.17e}"):
        assert all(same_text(found, wanted, Tolerance()) for found in spellings)
