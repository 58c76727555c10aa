"""Objects by their operators: arithmetic, order, containers, attributes."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "vector_arithmetic",
        """
import math


class Vector:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __add__(self, other):
        if not isinstance(other, Vector):
            return NotImplemented
        return Vector(self.x + other.x, self.y + other.y)

    def __mul__(self, k):
        return Vector(self.x * k, self.y * k)

    __rmul__ = __mul__

    def __neg__(self):
        return self * -1

    def __abs__(self):
        return math.hypot(self.x, self.y)

    def __eq__(self, other):
        return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self):
        return hash((self.x, self.y))

    def __bool__(self):
        return bool(self.x or self.y)

    def __iter__(self):
        return iter((self.x, self.y))
""",
        """
import pytest
from solution import Vector


def test_sum():
    assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)
    with pytest.raises(TypeError):
        Vector(1, 2) + 1


def test_scale():
    assert 2 * Vector(1, 2) == Vector(1, 2) * 2 == Vector(2, 4)
    assert -Vector(1, -1) == Vector(-1, 1)


def test_size():
    assert abs(Vector(3, 4)) == pytest.approx(5.0)
    assert not Vector(0, 0)
    assert Vector(0, 1)


def test_unpack():
    x, y = Vector(7, 8)
    assert (x, y) == (7, 8)
    assert len({Vector(1, 1), Vector(1, 1)}) == 1
""",
        ("bool(self.x or self.y)", "bool(self.x and self.y)"),
        ("self.y + other.y", "self.y + other.x"),
    ),
    unit(
        "money_order",
        """
from functools import total_ordering


@total_ordering
class Money:
    def __init__(self, cents, currency="EUR"):
        self.cents, self.currency = cents, currency

    def _same(self, other):
        if self.currency != other.currency:
            raise TypeError(f"{self.currency} and {other.currency}")

    def __eq__(self, other):
        if not isinstance(other, Money):
            return NotImplemented
        return (self.cents, self.currency) == (other.cents, other.currency)

    def __lt__(self, other):
        self._same(other)
        return self.cents < other.cents

    def __add__(self, other):
        if other == 0:
            return self
        self._same(other)
        return Money(self.cents + other.cents, self.currency)

    __radd__ = __add__

    def __str__(self):
        sign = "-" if self.cents < 0 else ""
        return f"{sign}{abs(self.cents) // 100}.{abs(self.cents) % 100:02d} {self.currency}"
""",
        """
import pytest
from solution import Money


def test_order():
    assert Money(1) < Money(2) <= Money(2)
    assert max([Money(5), Money(10), Money(7)]) == Money(10)
    assert sorted([Money(3), Money(1)])[0].cents == 1


def test_sum():
    assert sum([Money(10), Money(5)]) == Money(15)
    with pytest.raises(TypeError, match="EUR and USD"):
        Money(1) + Money(1, "USD")


def test_text():
    assert str(Money(1205)) == "12.05 EUR"
    assert f"{Money(-5)}" == "-0.05 EUR"
    assert str(Money(100, "USD")) == "1.00 USD"


def test_not_equal():
    assert Money(1) != Money(1, "USD")
    assert Money(1) != 1
""",
        (
            'sign = "-" if self.cents < 0 else ""',
            'sign = ""',
            "abs(self.cents) // 100",
            "self.cents // 100",
        ),
        ("return self.cents < other.cents", "return str(self.cents) < str(other.cents)"),
    ),
    unit(
        "sparse_list",
        """
class Sparse:
    def __init__(self, default=0):
        self.default = default
        self._cells = {}

    def __getitem__(self, key):
        if isinstance(key, slice):
            if key.stop is None:
                raise IndexError("endless")
            return [self[i] for i in range(key.start or 0, key.stop, key.step or 1)]
        return self._cells.get(key, self.default)

    def __setitem__(self, key, value):
        if value == self.default:
            self._cells.pop(key, None)
        else:
            self._cells[key] = value

    def __delitem__(self, key):
        del self._cells[key]

    def __contains__(self, key):
        return key in self._cells

    def __len__(self):
        return len(self._cells)
""",
        """
import pytest
from solution import Sparse


@pytest.fixture
def cells():
    made = Sparse()
    made[3] = "c"
    made[10**12] = "far"
    return made


def test_get(cells):
    assert cells[3] == "c"
    assert cells[4] == 0
    assert len(cells) == 2


def test_slice(cells):
    assert cells[2:5] == [0, "c", 0]
    assert cells[:4:3] == [0, "c"]
    with pytest.raises(IndexError):
        cells[1:]


def test_default_is_not_kept(cells):
    cells[3] = 0
    assert 3 not in cells
    assert len(cells) == 1


def test_delete(cells):
    del cells[3]
    assert 3 not in cells
    with pytest.raises(KeyError):
        del cells[3]
""",
        ("del self._cells[key]", "self._cells.pop(key, None)"),
        ("        if value == self.default:", "        if value is None:"),
    ),
    unit(
        "attribute_dict",
        """
class Settings(dict):
    def __getattr__(self, name):
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Settings(value) if type(value) is dict else value

    def __setattr__(self, name, value):
        self[name] = value

    def __or__(self, other):
        return Settings({**self, **other})
""",
        """
import pytest
from solution import Settings


def test_get():
    settings = Settings(a=1, b={"c": 2})
    assert settings.a == 1
    assert settings.b.c == 2
    assert settings["a"] == 1


def test_set():
    settings = Settings()
    settings.x = 5
    assert settings["x"] == 5
    assert dict(settings) == {"x": 5}


def test_missing():
    with pytest.raises(AttributeError):
        Settings().nothing
    assert getattr(Settings(), "nothing", "default") == "default"
    assert not hasattr(Settings(), "x")


def test_merge():
    first = Settings(a=1)
    merged = first | {"a": 2}
    assert merged.a == 2
    assert first.a == 1
    assert isinstance(merged, Settings)
""",
        ("raise AttributeError(name) from None", "return None"),
        ("return Settings({**self, **other})", "return {**self, **other}"),
    ),
    unit(
        "callable_pipeline",
        """
class Pipeline:
    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, value):
        for step in self.steps:
            value = step(value)
        return value

    def __or__(self, step):
        return Pipeline(*self.steps, step)

    def __repr__(self):
        names = [getattr(step, "__name__", repr(step)) for step in self.steps]
        return f"Pipeline({', '.join(names)})"
""",
        """
from solution import Pipeline


def double(x):
    return 2 * x


def test_call():
    assert Pipeline(double, str)(4) == "8"
    assert Pipeline()(4) == 4


def test_or():
    first = Pipeline(double)
    second = first | double | (lambda x: x - 1)
    assert second(1) == 3
    assert first(1) == 2


def test_repr():
    assert repr(Pipeline(double, len)) == "Pipeline(double, len)"


def test_nested():
    assert (Pipeline(double) | Pipeline(double, double))(1) == 8
    assert list(map(Pipeline(double), [1, 2])) == [2, 4]
""",
        (
            "return Pipeline(*self.steps, step)",
            "self.steps = (*self.steps, step)\n        return self",
        ),
        ("', '.join", "' | '.join"),
    ),
]
