"""Modules with functions and classes, and tests of fixtures, parameters, setups, exceptions."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "bounded_stack",
        """
class StackFull(Exception):
    pass


class Stack:
    def __init__(self, limit):
        self.limit = limit
        self._items = []

    def push(self, item):
        if len(self._items) >= self.limit:
            raise StackFull(f"more than {self.limit}")
        self._items.append(item)

    def pop(self):
        if not self._items:
            raise IndexError("empty stack")
        return self._items.pop()

    def __len__(self):
        return len(self._items)
""",
        """
import pytest
from solution import Stack, StackFull


@pytest.fixture
def stack():
    return Stack(2)


def test_last_in_first_out(stack):
    stack.push("a")
    stack.push("b")
    assert stack.pop() == "b"
    assert stack.pop() == "a"
    assert len(stack) == 0


def test_full(stack):
    stack.push(1)
    stack.push(2)
    with pytest.raises(StackFull, match="more than 2"):
        stack.push(3)
    assert len(stack) == 2


def test_empty(stack):
    with pytest.raises(IndexError):
        stack.pop()
""",
        (">= self.limit", "> self.limit"),
        ('raise IndexError("empty stack")', "return None"),
    ),
    unit(
        "slug_ids",
        """
import re
import unicodedata


def slug(title, limit=20):
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    out = ""
    for word in words:
        longer = f"{out}-{word}" if out else word
        if len(longer) > limit:
            break
        out = longer
    return out
""",
        """
import pytest

from solution import slug


@pytest.mark.parametrize(
    "title, expected",
    [
        pytest.param("Hello World", "hello-world", id="plain"),
        pytest.param("  Crème brûlée! ", "creme-brulee", id="accents"),
        pytest.param("", "", id="empty"),
        pytest.param("one two three four five", "one-two-three-four", id="cut"),
    ],
)
def test_slug(title, expected):
    assert slug(title) == expected


@pytest.mark.parametrize("limit", [1, 3, 7], ids=["one", "three", "seven"])
def test_limit(limit):
    assert len(slug("a bc def", limit=limit)) <= limit


def test_exactly_at_the_limit():
    assert slug("abc def", limit=7) == "abc-def"
""",
        ("len(longer) > limit", "len(longer) >= limit"),
        ('unicodedata.normalize("NFKD", title)', "title"),
    ),
    unit(
        "ledger_unittest",
        """
class InsufficientFunds(ValueError):
    def __init__(self, missing):
        super().__init__(f"missing {missing}")
        self.missing = missing


class Account:
    def __init__(self, balance=0, history=None):
        self.balance = balance
        self.history = list(history or [])

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise InsufficientFunds(amount - self.balance)
        self.balance -= amount
        self.history.append(("withdraw", amount))
""",
        """
import unittest

from solution import Account, InsufficientFunds


class TestAccount(unittest.TestCase):
    def setUp(self):
        self.account = Account(10)

    def test_deposit(self):
        self.account.deposit(5)
        self.assertEqual(self.account.balance, 15)
        self.assertEqual(self.account.history, [("deposit", 5)])

    def test_overdraft(self):
        with self.assertRaises(InsufficientFunds) as caught:
            self.account.withdraw(25)
        self.assertEqual(caught.exception.missing, 15)
        self.assertEqual(self.account.balance, 10)

    def test_all_can_be_taken(self):
        self.account.withdraw(10)
        self.assertEqual(self.account.balance, 0)

    def test_histories_are_apart(self):
        other = Account()
        self.account.deposit(1)
        self.assertEqual(other.history, [])
        self.assertRaises(ValueError, other.deposit, 0)


if __name__ == "__main__":
    unittest.main()
""",
        (
            "history=None",
            "history=[]",
            "list(history or [])",
            "history",
        ),
        ("InsufficientFunds(amount - self.balance)", "InsufficientFunds(amount)"),
    ),
    unit(
        "greeting_capsys",
        """
def greet(names, shout=False):
    for name in names:
        text = f"Hello, {name}!"
        print(text.upper() if shout else text)
    return len(names)
""",
        """
from solution import greet


def test_prints_a_line_each(capsys):
    assert greet(["Ada", "Bo"]) == 2
    assert capsys.readouterr().out == "Hello, Ada!\\nHello, Bo!\\n"


def test_shouts(capsys):
    greet(["Ada"], shout=True)
    captured = capsys.readouterr()
    assert captured.out == "HELLO, ADA!\\n"
    assert captured.err == ""


def test_nobody(capsys):
    assert greet([]) == 0
    assert capsys.readouterr().out == ""
""",
        ("text.upper() if shout else text", "text.title() if shout else text"),
        ("return len(names)", "return len(names) or None"),
    ),
    unit(
        "config_file",
        """
def load(path):
    out = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.split("#", 1)[0].strip()
            if line:
                key, sep, value = line.partition("=")
                if not sep:
                    raise ValueError(f"no value: {line}")
                out[key.strip()] = value.strip()
    return out
""",
        """
import pytest

from solution import load


def test_load(tmp_path):
    path = tmp_path / "app.conf"
    text = "# comment\\nname = caf\\u00e9\\n\\nport=80 # low\\nq = a=b\\n"
    path.write_text(text, encoding="utf-8")
    assert load(path) == {"name": "caf\\u00e9", "port": "80", "q": "a=b"}


def test_text_path(tmp_path):
    path = tmp_path / "empty.conf"
    path.write_text("")
    assert load(str(path)) == {}


def test_no_value(tmp_path):
    path = tmp_path / "bad.conf"
    path.write_text("alone\\n")
    with pytest.raises(ValueError) as info:
        load(path)
    assert str(info.value) == "no value: alone"


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
""",
        ('line.partition("=")', 'line.rpartition("=")'),
        ('f"no value: {line}"', 'f"no value: {line!r}"'),
    ),
    unit(
        "settings_monkeypatch",
        """
import os


def timeout():
    raw = os.environ.get("APP_TIMEOUT", "")
    if not raw.strip():
        return 30.0
    value = float(raw)
    if value < 0:
        raise ValueError("APP_TIMEOUT is negative")
    return value
""",
        """
import pytest

from solution import timeout


def test_default(monkeypatch):
    monkeypatch.delenv("APP_TIMEOUT", raising=False)
    assert timeout() == 30.0


def test_set(monkeypatch):
    monkeypatch.setenv("APP_TIMEOUT", "2.5")
    assert timeout() == 2.5


def test_zero_is_a_value(monkeypatch):
    monkeypatch.setenv("APP_TIMEOUT", "0")
    assert timeout() == 0.0


def test_negative(monkeypatch):
    monkeypatch.setenv("APP_TIMEOUT", "-1")
    with pytest.raises(ValueError, match="negative"):
        timeout()
""",
        ("return value", "return value or 30.0"),
        ("if value < 0", "if value < -1"),
    ),
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
