"""Parameters: ids, several decorators, objects and functions as values, expected errors."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "stacked_parameters",
        """
def clamp(x, low=None, high=None):
    if low is not None and high is not None and low > high:
        raise ValueError("low is above high")
    if low is not None and x < low:
        return low
    if high is not None and x > high:
        return high
    return x
""",
        """
import pytest
from solution import clamp


@pytest.mark.parametrize("x", [-5, 0, 5, 0.5])
@pytest.mark.parametrize("low,high", [(-1, 1), (0, 0), (-10, 10)])
def test_within(x, low, high):
    assert low <= clamp(x, low, high) <= high


@pytest.mark.parametrize("x", [3, -3], ids=["above", "below"])
def test_open_ends(x):
    assert clamp(x) == x
    assert clamp(x, low=0) == max(x, 0)
    assert clamp(x, high=0) == min(x, 0)


def test_kind_is_kept():
    assert isinstance(clamp(0.0, 0, 1), float)
    with pytest.raises(ValueError):
        clamp(1, 2, 1)
""",
        ("if low is not None and x < low", "if low and x < low"),
        ("if low is not None and x < low", "if low is not None and x <= low"),
    ),
    unit(
        "expected_or_error",
        """
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text):
    total, number, seen = 0, "", False
    for c in text.strip():
        if c.isdigit():
            number += c
        elif c in UNITS and number:
            total += int(number) * UNITS[c]
            number, seen = "", True
        elif c == " " and not number:
            continue
        else:
            raise ValueError(f"cannot read {text!r}")
    if number or not seen:
        raise ValueError(f"cannot read {text!r}")
    return total
""",
        """
from contextlib import nullcontext

import pytest
from solution import seconds


@pytest.mark.parametrize(
    ("text", "wanted", "outcome"),
    [
        ("90s", 90, nullcontext()),
        ("1h 30m", 5400, nullcontext()),
        ("2d", 172800, nullcontext()),
        ("1h30", None, pytest.raises(ValueError, match="cannot read '1h30'")),
        ("", None, pytest.raises(ValueError)),
        ("h", None, pytest.raises(ValueError)),
        ("1 h", None, pytest.raises(ValueError)),
        ("-1s", None, pytest.raises(ValueError)),
    ],
)
def test_seconds(text, wanted, outcome):
    with outcome:
        assert seconds(text) == wanted
""",
        ("if number or not seen", "if number"),
        ('elif c == " " and not number', 'elif c == " "'),
    ),
    unit(
        "callables_as_parameters",
        """
def apply_all(functions, value):
    out = []
    for function in functions:
        try:
            out.append((function.__name__, function(value)))
        except Exception as error:
            out.append((function.__name__, type(error).__name__))
    return out
""",
        """
import math

import pytest
from solution import apply_all


@pytest.mark.parametrize(
    ("functions", "value", "wanted"),
    [
        pytest.param([str, int], "7", [("str", "7"), ("int", 7)], id="text"),
        pytest.param([len], 3, [("len", "TypeError")], id="error"),
        pytest.param([], 1, [], id="none"),
        pytest.param([math.sqrt, abs], 4.0, [("sqrt", 2.0), ("abs", 4.0)], id="numbers"),
    ],
)
def test_apply(functions, value, wanted):
    assert apply_all(functions, value) == wanted


def test_own_errors():
    class Odd(Exception):
        pass

    def bad(x):
        raise Odd(x)

    assert apply_all([bad], 1) == [("bad", "Odd")]
""",
        ("type(error).__name__", "str(type(error))"),
        ("except Exception as error", "except TypeError as error"),
    ),
    unit(
        "ids_function",
        """
from datetime import date, timedelta


def add_workdays(start, days, holidays=()):
    step = 1 if days >= 0 else -1
    current, left = start, abs(days)
    while left:
        current += timedelta(days=step)
        if current.weekday() < 5 and current not in holidays:
            left -= 1
    return current
""",
        """
from datetime import date

import pytest
from solution import add_workdays

FRIDAY = date(2024, 3, 1)


@pytest.mark.parametrize(
    "days, wanted",
    [
        (0, date(2024, 3, 1)),
        (1, date(2024, 3, 4)),
        (5, date(2024, 3, 8)),
        (-1, date(2024, 2, 29)),
        (-5, date(2024, 2, 23)),
    ],
    ids=str,
)
def test_days(days, wanted):
    assert add_workdays(FRIDAY, days) == wanted


def test_holidays():
    assert add_workdays(FRIDAY, 1, {date(2024, 3, 4)}) == date(2024, 3, 5)
    assert add_workdays(FRIDAY, 1, [date(2024, 3, 2)]) == date(2024, 3, 4)


def test_weekend_start():
    assert add_workdays(date(2024, 3, 2), 1) == date(2024, 3, 4)
""",
        ("weekday() < 5", "weekday() <= 5"),
        ("step = 1 if days >= 0 else -1", "step = 1"),
    ),
    unit(
        "instances_as_parameters",
        """
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, order=True)
class Version:
    major: int
    minor: int = 0
    patch: int = 0
    label: str = field(default="", compare=False)

    def bump(self, part):
        if part == "major":
            return Version(self.major + 1)
        if part == "minor":
            return Version(self.major, self.minor + 1)
        return replace(self, patch=self.patch + 1, label="")

    def __str__(self):
        return f"{self.major}.{self.minor}.{self.patch}" + (f"-{self.label}" if self.label else "")
""",
        """
import pytest
from solution import Version

BASE = Version(1, 2, 3, "rc")


@pytest.mark.parametrize(
    ("part", "wanted"),
    [("major", Version(2)), ("minor", Version(1, 3)), ("patch", Version(1, 2, 4))],
)
def test_bump(part, wanted):
    assert BASE.bump(part) == wanted
    assert str(BASE.bump(part)) == str(wanted)


@pytest.mark.parametrize("version,text", [(BASE, "1.2.3-rc"), (Version(0), "0.0.0")])
def test_text(version, text):
    assert str(version) == text


def test_order():
    assert Version(1, 10) > Version(1, 9, 9)
    assert sorted([Version(2), Version(1, 1), Version(1)])[0] == Version(1, 0, 0)


def test_frozen():
    with pytest.raises(AttributeError):
        BASE.major = 9


def test_label_does_not_count():
    assert BASE == Version(1, 2, 3)
    assert BASE.label == "rc"
""",
        (', label="")\n', ")\n"),
        ("frozen=True, ", "unsafe_hash=True, "),
    ),
    unit(
        "class_wide_parameters",
        """
class Ring:
    def __init__(self, size):
        if size <= 0:
            raise ValueError("size")
        self.size, self._items, self._start = size, [], 0

    def add(self, item):
        if len(self._items) < self.size:
            self._items.append(item)
        else:
            self._items[self._start] = item
            self._start = (self._start + 1) % self.size

    def __iter__(self):
        for i in range(len(self._items)):
            yield self._items[(self._start + i) % len(self._items)]

    def __len__(self):
        return len(self._items)
""",
        """
import pytest
from solution import Ring


@pytest.mark.parametrize("size", [1, 2, 3, 7])
class TestRing:
    def test_keeps_the_last(self, size):
        ring = Ring(size)
        for i in range(10):
            ring.add(i)
        assert list(ring) == list(range(10))[-size:]
        assert len(ring) == size

    def test_partly_full(self, size):
        ring = Ring(size)
        assert list(ring) == []
        ring.add("x")
        assert list(ring) == ["x"]
        assert len(ring) == 1


@pytest.mark.parametrize("size", (0, -1))
def test_bad(size):
    pytest.raises(ValueError, Ring, size)
""",
        (
            "self._start = (self._start + 1) % self.size",
            "self._start = min(self._start + 1, self.size - 1)",
        ),
        ("if size <= 0", "if size < 0"),
    ),
    unit(
        "approx_parameters",
        """
import math


def statistics(values):
    n = len(values)
    if n < 2:
        raise ValueError("at least two values")
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return {"mean": mean, "sd": math.sqrt(variance), "n": n}
""",
        """
import pytest
from solution import statistics


@pytest.mark.parametrize(
    "values, mean, sd",
    [([1, 2, 3, 4], 2.5, 1.2909944), ([0.1] * 10, 0.1, 0.0), ([1e9, 1e9 + 2], 1e9 + 1, 2**0.5)],
)
def test_values(values, mean, sd):
    found = statistics(values)
    assert found["mean"] == pytest.approx(mean)
    assert found["sd"] == pytest.approx(sd, abs=1e-6)


def test_table():
    assert statistics([2, 4]) == pytest.approx({"mean": 3.0, "sd": 1.41421356, "n": 2})
    assert statistics([2, 4])["n"] == 2


def test_too_few():
    with pytest.raises(ValueError, match="two"):
        statistics([1.0])
""",
        ("/ (n - 1)", "/ n"),
        ("if n < 2", "if n < 1"),
    ),
    unit(
        "indirect_parameters",
        """
class Account:
    def __init__(self, kind):
        if kind not in ("free", "paid"):
            raise ValueError(kind)
        self.kind = kind

    @property
    def quota(self):
        return 10 if self.kind == "free" else None

    def allows(self, used):
        return self.quota is None or used < self.quota
""",
        """
import pytest
from solution import Account


@pytest.fixture
def account(request):
    return Account(request.param)


@pytest.mark.parametrize("account", ["free", "paid"], indirect=True)
def test_some(account):
    assert account.allows(9)


@pytest.mark.parametrize(
    "account,used,allowed",
    [("free", 10, False), ("paid", 10, True), ("free", 0, True)],
    indirect=["account"],
)
def test_limits(account, used, allowed):
    assert account.allows(used) is allowed


def test_unknown():
    with pytest.raises(ValueError):
        Account("gold")
""",
        ("used < self.quota", "used <= self.quota"),
        ("self.quota is None or", "not self.quota and"),
    ),
]
