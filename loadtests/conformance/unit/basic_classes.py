"""Modules with tests of classes, coroutines, decimals and generators."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "shapes_hierarchy",
        """
from abc import ABC, abstractmethod
import math


class Shape(ABC):
    @abstractmethod
    def area(self):
        ...

    def __lt__(self, other):
        return self.area() < other.area()


class Circle(Shape):
    def __init__(self, r):
        self.r = r

    def area(self):
        return math.pi * self.r**2


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side**2
""",
        """
import math

import pytest

from solution import Circle, Shape, Square


class TestShapes:
    def setup_method(self):
        self.shapes = [Square(3), Circle(1), Square(1)]

    def test_area(self):
        assert Circle(2).area() == pytest.approx(4 * math.pi)
        assert Square(3).area() == 9

    def test_sorted(self):
        assert [round(s.area(), 2) for s in sorted(self.shapes)] == [1, 3.14, 9]

    def test_abstract(self):
        with pytest.raises(TypeError):
            Shape()

    def test_own_subclass(self):
        class Dot(Shape):
            def area(self):
                return 0

        assert Dot() < Square(1)
        assert isinstance(Dot(), Shape)


class TestEdges:
    class TestNothing:
        def test_no_area(self):
            assert Circle(0).area() == 0
            assert issubclass(Square, Shape)
""",
        ("self.area() < other.area()", "self.area() > other.area()"),
        ("    @abstractmethod\n", ""),
    ),
    unit(
        "async_cache",
        """
import asyncio


class Cache:
    def __init__(self, load):
        self._load = load
        self._found = {}

    async def get(self, key):
        if key not in self._found:
            await asyncio.sleep(0)
            self._found[key] = await self._load(key)
        return self._found[key]
""",
        """
import asyncio

import pytest

from solution import Cache


@pytest.fixture
def calls():
    return []


@pytest.mark.asyncio
async def test_loads_once(calls):
    async def load(key):
        calls.append(key)
        return None if key == "none" else key * 2

    cache = Cache(load)
    assert await cache.get("ab") == "abab"
    assert await cache.get("ab") == "abab"
    assert await cache.get("none") is None
    assert await cache.get("none") is None
    assert calls == ["ab", "none"]


def test_in_a_loop_of_its_own():
    async def load(key):
        raise KeyError(key)

    async def main():
        with pytest.raises(KeyError):
            await Cache(load).get("x")

    asyncio.run(main())
""",
        ("if key not in self._found:", "if self._found.get(key) is None:"),
        ("return self._found[key]", "return self._found.pop(key)"),
    ),
    unit(
        "money_decimal",
        """
from decimal import ROUND_HALF_EVEN, Decimal


def split_bill(total, people, tip=Decimal("0")):
    if people < 1:
        raise ValueError("nobody pays")
    cents = (total * (1 + tip)).quantize(Decimal("0.01"), rounding=ROUND_HALF_EVEN)
    share = (cents / people).quantize(Decimal("0.01"), rounding="ROUND_DOWN")
    shares = [share] * people
    shares[0] += cents - share * people
    return shares
""",
        """
from decimal import Decimal
from fractions import Fraction

import pytest

from solution import split_bill

D = Decimal


def test_even():
    assert split_bill(D("10.00"), 2) == [D("5.00"), D("5.00")]


def test_rest_goes_to_the_first():
    assert split_bill(D("10.00"), 3) == [D("3.34"), D("3.33"), D("3.33")]


def test_sum_is_exact():
    shares = split_bill(D("99.99"), 7, tip=D("0.15"))
    assert sum(shares) == D("114.99")
    assert all(isinstance(share, Decimal) for share in shares)


def test_nobody():
    with pytest.raises(ValueError):
        split_bill(D("1"), 0)


def test_half_even():
    assert split_bill(D("0.125"), 1) == [D("0.12")]
    assert Fraction(split_bill(D("0.135"), 1)[0]) == Fraction(7, 50)
""",
        ("rounding=ROUND_HALF_EVEN", 'rounding="ROUND_HALF_UP"'),
        ("return shares", "return [float(share) for share in shares]"),
    ),
    unit(
        "batches_generator",
        """
from itertools import islice


def batches(items, size):
    iterator = iter(items)
    while batch := tuple(islice(iterator, size)):
        yield batch
""",
        """
from itertools import count, islice

from solution import batches


def test_parts():
    assert list(batches("abcde", 2)) == [("a", "b"), ("c", "d"), ("e",)]


def test_empty():
    assert list(batches([], 3)) == []


def test_lazy():
    found = batches(count(), 3)
    assert next(found) == (0, 1, 2)
    assert list(islice(found, 2)) == [(3, 4, 5), (6, 7, 8)]


def test_one_pass():
    source = iter(range(4))
    first = next(batches(source, 2))
    assert first == (0, 1)
    assert list(source) == [2, 3]
""",
        ("tuple(islice", "list(islice"),
        ("iterator = iter(items)", "iterator = iter(list(islice(items, 100)))"),
    ),
]
