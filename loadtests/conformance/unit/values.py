"""Values of the standard library: fractions, decimals, dates, deques, named tuples."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "egyptian_fractions",
        """
from fractions import Fraction


def egyptian(value):
    value = Fraction(value)
    if not 0 < value < 1:
        raise ValueError(value)
    out = []
    while value:
        part = Fraction(1, -(-value.denominator // value.numerator))
        out.append(part)
        value -= part
    return out
""",
        """
from fractions import Fraction

import pytest
from solution import egyptian


def test_parts():
    assert egyptian(Fraction(5, 6)) == [Fraction(1, 2), Fraction(1, 3)]
    assert egyptian("7/15") == [Fraction(1, 3), Fraction(1, 8), Fraction(1, 120)]


def test_sum():
    value = Fraction(4, 13)
    assert sum(egyptian(value)) == value
    assert all(part.numerator == 1 for part in egyptian(value))


def test_unit():
    assert egyptian(0.5) == [Fraction(1, 2)]
    for bad in (0, 1, Fraction(-1, 2)):
        with pytest.raises(ValueError):
            egyptian(bad)
""",
        ("-(-value.denominator // value.numerator)", "value.denominator // value.numerator + 1"),
        ("0 < value < 1", "0 < value <= 1"),
    ),
    unit(
        "fraction_type",
        """
from fractions import Fraction


def mean(values):
    values = [Fraction(v) for v in values]
    return sum(values, Fraction(0)) / len(values) if values else None
""",
        """
from fractions import Fraction

from solution import mean


def test_exact():
    assert mean([1, 2]) == Fraction(3, 2)
    assert isinstance(mean([1, 2]), Fraction)


def test_thirds():
    assert mean([Fraction(1, 3)] * 3) == Fraction(1, 3)
    assert mean(["1/3", "1/6"]) == Fraction(1, 4)


def test_whole_is_a_fraction_too():
    found = mean([2, 4])
    assert found == 3 and type(found) is Fraction


def test_nothing():
    assert mean([]) is None
""",
        (
            "return sum(values, Fraction(0)) / len(values)",
            "return float(sum(values, Fraction(0)) / len(values))",
        ),
        ("[Fraction(v) for v in values]", "[Fraction(v).limit_denominator(2) for v in values]"),
    ),
    unit(
        "decimal_rounding",
        """
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation


def price(text, vat="0.20"):
    try:
        net = Decimal(text.replace(",", "."))
    except InvalidOperation:
        raise ValueError(f"no price: {text}") from None
    return (net * (1 + Decimal(vat))).quantize(Decimal("0.01"), ROUND_HALF_UP)
""",
        """
from decimal import Decimal

import pytest
from solution import price


@pytest.mark.parametrize(
    "text,wanted", [("10", "12.00"), ("0,99", "1.19"), ("1.0375", "1.25"), ("0", "0.00")]
)
def test_price(text, wanted):
    assert price(text) == Decimal(wanted)
    assert str(price(text)) == wanted


def test_no_vat():
    assert price("2.675", vat="0") == Decimal("2.68")


def test_kind():
    assert isinstance(price("1"), Decimal)
    with pytest.raises(ValueError, match="no price: x"):
        price("x")
""",
        ('quantize(Decimal("0.01"), ROUND_HALF_UP)', 'quantize(Decimal("0.01"))'),
        ('text.replace(",", ".")', 'text.replace(",", "")'),
    ),
    unit(
        "calendar_dates",
        """
from datetime import date, timedelta


def easter(year):
    a, b, c = year % 19, year // 100, year % 100
    d, e = divmod(b, 4)
    g = (8 * b + 13) // 25
    h = (19 * a + b - d - g + 15) % 30
    i, k = divmod(c, 4)
    n = (32 + 2 * e + 2 * i - h - k) % 7
    m = (a + 11 * h + 22 * n) // 451
    month, day = divmod(h + n - 7 * m + 114, 31)
    return date(year, month, day + 1)


def whit_sunday(year):
    return easter(year) + timedelta(weeks=7)
""",
        """
from datetime import date, timedelta

import pytest
from solution import easter, whit_sunday


@pytest.mark.parametrize(
    "wanted",
    [date(2024, 3, 31), date(2025, 4, 20), date(2019, 4, 21), date(1981, 4, 19), date(2038, 4, 25)],
)
def test_easter(wanted):
    assert easter(wanted.year) == wanted


def test_sundays():
    assert all(easter(year).weekday() == 6 for year in range(1990, 2060))


def test_whit():
    assert whit_sunday(2024) - easter(2024) == timedelta(days=49)
    assert whit_sunday(2024).isoformat() == "2024-05-19"
""",
        ("- 7 * m + 114", "+ 114"),
        ("timedelta(weeks=7)", "timedelta(days=50)"),
    ),
    unit(
        "datetime_zones",
        """
from datetime import datetime, timedelta, timezone


def to_utc(text):
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc)


def age(text, now):
    left = now - to_utc(text)
    if left < timedelta(0):
        return "in the future"
    if left < timedelta(hours=1):
        return f"{left.seconds // 60} min"
    return f"{left.days} d" if left.days else f"{left.seconds // 3600} h"
""",
        """
from datetime import datetime, timedelta, timezone

import pytest
from solution import age, to_utc

NOW = datetime(2024, 1, 2, 12, 0, tzinfo=timezone.utc)


def test_offset():
    assert to_utc("2024-01-01T02:00:00+02:00") == datetime(2024, 1, 1, tzinfo=timezone.utc)
    assert to_utc("2024-01-01T02:00:00+02:00").tzinfo is timezone.utc


def test_naive_is_utc():
    assert to_utc("2024-01-01").hour == 0


@pytest.mark.parametrize(
    "back,text",
    [
        (timedelta(0), "0 min"),
        (timedelta(minutes=59), "59 min"),
        (timedelta(hours=1), "1 h"),
        (timedelta(days=2, hours=5), "2 d"),
    ],
)
def test_age(back, text):
    assert age((NOW - back).isoformat(), NOW) == text


def test_future():
    assert age("2024-01-02T12:00:01", NOW) == "in the future"
""",
        ("if left < timedelta(hours=1)", "if left <= timedelta(hours=1)"),
        ("    return moment.astimezone(timezone.utc)", "    return moment"),
    ),
    unit(
        "deque_history",
        """
from collections import deque


class Undo:
    def __init__(self, limit=None):
        self._past = deque(maxlen=limit)
        self._future = deque()

    def do(self, state):
        self._past.append(state)
        self._future.clear()

    def undo(self):
        if len(self._past) < 2:
            return None
        self._future.append(self._past.pop())
        return self._past[-1]

    def redo(self):
        if not self._future:
            return None
        self._past.append(self._future.pop())
        return self._past[-1]

    def past(self):
        return deque(self._past)
""",
        """
from collections import deque

from solution import Undo


def filled(*states, limit=None):
    undo = Undo(limit)
    for state in states:
        undo.do(state)
    return undo


def test_undo_redo():
    undo = filled("a", "b", "c")
    assert undo.undo() == "b"
    assert undo.undo() == "a"
    assert undo.undo() is None
    assert undo.redo() == "b"
    assert undo.redo() == "c"


def test_new_state_drops_the_future():
    undo = filled(1, 2)
    undo.undo()
    undo.do(3)
    assert undo.redo() is None
    assert undo.past() == deque([1, 3])


def test_limit():
    undo = filled(*range(9), limit=3)
    assert undo.past() == deque([6, 7, 8])
    assert isinstance(undo.past(), deque)


def test_copy():
    undo = filled(1)
    undo.past().append(2)
    assert list(undo.past()) == [1]
""",
        ("        return deque(self._past)", "        return self._past"),
        ("        self._future.clear()\n", ""),
    ),
    unit(
        "named_points",
        """
from collections import namedtuple
from typing import NamedTuple

Point = namedtuple("Point", "x y", defaults=[0])


class Box(NamedTuple):
    low: Point
    high: Point

    @property
    def size(self):
        return self.high.x - self.low.x, self.high.y - self.low.y


def bounds(points):
    points = [Point(*p) for p in points]
    if not points:
        raise ValueError("no points")
    xs, ys = zip(*points)
    return Box(Point(min(xs), min(ys)), Point(max(xs), max(ys)))
""",
        """
import pytest
from solution import Box, Point, bounds


def test_fields():
    point = Point(3)
    assert (point.x, point.y) == (3, 0)
    assert point == (3, 0)
    assert point._replace(y=2) == Point(3, 2)


def test_bounds():
    found = bounds([(1, 5), (4, 2), (3,)])
    assert found == Box(Point(1, 0), Point(4, 5))
    assert found.low.y == 0
    assert found.size == (3, 5)
    low, high = found
    assert high.x == 4 and isinstance(low, tuple)


def test_none():
    with pytest.raises(ValueError):
        bounds([])
""",
        ("defaults=[0]", "defaults=[1]"),
        (
            "return Box(Point(min(xs), min(ys)), Point(max(xs), max(ys)))",
            "return Box(Point(xs[0], ys[0]), Point(max(xs), max(ys)))",
        ),
    ),
]
