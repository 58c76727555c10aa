"""Suites of objects with a state: copies, boards, options, iteration over again."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "doc_examples",
        '''
class Poly:
    """A polynomial by its coefficients, the constant first."""

    def __init__(self, *c):
        while c and c[-1] == 0:
            c = c[:-1]
        self.c = tuple(c)

    def __call__(self, x):
        value = 0
        for c in reversed(self.c):
            value = value * x + c
        return value

    def __mul__(self, other):
        out = [0] * max(0, len(self.c) + len(other.c) - 1)
        for i, a in enumerate(self.c):
            for j, b in enumerate(other.c):
                out[i + j] += a * b
        return Poly(*out)

    def derivative(self):
        return Poly(*(i * c for i, c in enumerate(self.c) if i))

    @property
    def degree(self):
        return len(self.c) - 1

    def __eq__(self, other):
        return isinstance(other, Poly) and self.c == other.c

    def __repr__(self):
        return f"Poly{self.c}" if len(self.c) != 1 else f"Poly({self.c[0]})"
''',
        """
import pytest
from solution import Poly


def test_call():
    assert Poly(1, 2, 3)(2) == 17
    assert Poly()(5) == 0
    assert Poly(0, 1)(0.5) == 0.5


def test_trailing_zeros():
    assert Poly(1, 0, 0) == Poly(1)
    assert Poly(0).degree == -1
    assert repr(Poly(1, 0)) == "Poly(1)"


def test_product():
    assert Poly(1, 1) * Poly(-1, 1) == Poly(-1, 0, 1)
    assert (Poly() * Poly(1, 2)).degree == -1


def test_derivative():
    assert Poly(5, 3, 2).derivative() == Poly(3, 4)
    assert Poly(7).derivative() == Poly()
    assert Poly.__doc__.startswith("A polynomial")
    assert repr(Poly(1, 2)) == "Poly(1, 2)"
""",
        ("        while c and c[-1] == 0:\n            c = c[:-1]\n", ""),
        ("out[i + j] += a * b", "out[i + j] = a * b"),
    ),
    unit(
        "own_iterator_class",
        '''
class Countdown:
    """May be iterated over many times."""

    def __init__(self, start, step=1):
        if step <= 0:
            raise ValueError("step")
        self.start, self.step = start, step

    def __iter__(self):
        return CountdownIterator(self)

    def __reversed__(self):
        return reversed(list(self))

    def __len__(self):
        return max(0, -(-self.start // self.step))


class CountdownIterator:
    def __init__(self, owner):
        self.left, self.step = owner.start, owner.step

    def __iter__(self):
        return self

    def __next__(self):
        if self.left <= 0:
            raise StopIteration
        self.left -= self.step
        return self.left + self.step
''',
        """
import pytest
from solution import Countdown


def test_twice():
    countdown = Countdown(3)
    assert list(countdown) == [3, 2, 1]
    assert list(countdown) == [3, 2, 1]


def test_nested():
    countdown = Countdown(2)
    assert [(a, b) for a in countdown for b in countdown] == [(2, 2), (2, 1), (1, 2), (1, 1)]


@pytest.mark.parametrize("start,step,n", [(0, 1, 0), (5, 2, 3), (6, 3, 2), (-1, 1, 0)])
def test_len(start, step, n):
    assert len(Countdown(start, step)) == n
    assert len(list(Countdown(start, step))) == n


def test_reversed():
    assert list(reversed(Countdown(5, 2))) == [1, 3, 5]
    assert sum(Countdown(4)) == 10
    assert max(Countdown(4)) == 4
    assert 3 in Countdown(4)
""",
        (
            "        return CountdownIterator(self)",
            '        self.__dict__.setdefault("once", CountdownIterator(self))\n'
            "        return self.once",
        ),
        ("-(-self.start // self.step)", "self.start // self.step"),
    ),
    unit(
        "options_and_keywords",
        """
def call(function, /, *args, _limit=3, **kwargs):
    if len(args) > _limit:
        raise TypeError(f"at most {_limit} arguments")
    return function(*args, **kwargs)


def options(*names, default=None, **given):
    unknown = sorted(given.keys() - set(names))
    if unknown:
        raise TypeError("unknown: " + ", ".join(unknown))
    return {name: given.get(name, default) for name in names}
""",
        """
import pytest
from solution import call, options


def test_call():
    assert call(max, 1, 5, 3) == 5
    assert call(sorted, [3, 1], reverse=True) == [3, 1]
    assert call(dict, function=1) == {"function": 1}


def test_limit():
    with pytest.raises(TypeError, match="at most 1"):
        call(max, 1, 2, _limit=1)
    assert call(max, 1, 2, 3, 4, _limit=4) == 4


def test_options():
    assert options("a", "b", a=1) == {"a": 1, "b": None}
    assert options("a", default=0) == {"a": 0}
    assert list(options("z", "a", a=1)) == ["z", "a"]
    assert options("a", a=None, default=5) == {"a": None}


def test_unknown():
    with pytest.raises(TypeError, match="unknown: x, y$"):
        options("a", y=1, x=2)
""",
        ("given.get(name, default)", "given.get(name) or default"),
        ("len(args) > _limit", "len(args) >= _limit"),
    ),
    unit(
        "mutable_results",
        """
class Board:
    def __init__(self, n=3):
        self._cells = [[None] * n for _ in range(n)]

    def put(self, r, c, mark):
        if self._cells[r][c] is not None:
            raise ValueError("taken")
        self._cells[r][c] = mark

    def rows(self):
        return [row[:] for row in self._cells]

    def winner(self):
        n = len(self._cells)
        lines = self.rows() + [list(column) for column in zip(*self._cells)]
        lines.append([self._cells[i][i] for i in range(n)])
        lines.append([self._cells[i][n - 1 - i] for i in range(n)])
        return next((line[0] for line in lines if line[0] and len(set(line)) == 1), None)
""",
        """
import pytest
from solution import Board


@pytest.fixture
def board():
    return Board()


def test_rows_are_copies(board):
    board.rows()[0][0] = "x"
    assert board.rows() == [[None] * 3 for _ in range(3)]


def test_rows_are_apart(board):
    board.put(0, 1, "o")
    assert board.rows()[1] == [None, None, None]
    with pytest.raises(ValueError):
        board.put(0, 1, "x")


@pytest.mark.parametrize(
    "cells",
    [[(0, 0), (0, 1), (0, 2)], [(0, 2), (1, 2), (2, 2)], [(0, 2), (1, 1), (2, 0)]],
)
def test_winner(board, cells):
    for r, c in cells[:2]:
        board.put(r, c, "x")
    assert board.winner() is None
    board.put(*cells[2], "x")
    assert board.winner() == "x"


def test_mixed(board):
    for c, mark in enumerate("xox"):
        board.put(1, c, mark)
    assert board.winner() is None
""",
        ("[row[:] for row in self._cells]", "list(self._cells)"),
        ("[[None] * n for _ in range(n)]", "[[None] * n] * n"),
    ),
    unit(
        "deep_copies",
        """
import copy


class Config:
    defaults = {"paths": ["/"], "debug": False}

    def __init__(self, **changes):
        self.values = copy.deepcopy(self.defaults)
        self.values.update(changes)

    def child(self, **changes):
        made = Config(**copy.deepcopy(self.values))
        made.values.update(changes)
        return made

    def __getitem__(self, key):
        return self.values[key]
""",
        """
import copy

import pytest
from solution import Config


def test_defaults_stay():
    config = Config()
    config["paths"].append("/tmp")
    assert Config()["paths"] == ["/"]
    assert Config.defaults["paths"] == ["/"]


def test_child():
    parent = Config(debug=True, extra={"a": [1]})
    child = parent.child(name="c")
    child["extra"]["a"].append(2)
    assert parent["extra"] == {"a": [1]}
    assert child["debug"] is True
    with pytest.raises(KeyError):
        parent["name"]


def test_deepcopy():
    config = Config()
    other = copy.deepcopy(config)
    other["paths"].clear()
    assert config["paths"] == ["/"]
""",
        ("copy.deepcopy(self.defaults)", "dict(self.defaults)"),
        ("Config(**copy.deepcopy(self.values))", "Config(**self.values)"),
    ),
]
