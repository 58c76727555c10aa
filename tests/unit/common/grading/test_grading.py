"""Gold answers in the form that rewards compare, and tests that the runner does not support."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.grading import pytest_support, styles
from meshrl.common.grading.cases import InvalidTests
from meshrl.common.grading.golds import (
    InvalidGold,
    parse_choice_gold,
    parse_math_gold,
    parse_text_gold,
)
from meshrl.common.grading.isolated_support import find_unsupported

CITIES = ["London", "Paris", "Rome"]
LABELLED = {"text": CITIES, "label": ["A", "B", "C"]}
NUMBERED = {"text": CITIES, "label": ["1", "2", "3"]}
TABLES = [{"label": "A", "text": "London"}, {"label": "B", "text": "Paris"}]
# Gold, choices (None: the row has none), expected letter.
CHOICE_GOLDS: list[tuple[Any, Any, str]] = [
    ("B", None, "B"),
    ("b", None, "B"),
    ("(B)", None, "B"),
    ("B.", None, "B"),
    ("B. Paris", None, "B"),
    ("Paris", CITIES, "B"),
    ("paris ", CITIES, "B"),
    (1, CITIES, "B"),
    (1.0, CITIES, "B"),
    ("1", CITIES, "B"),
    (0, CITIES, "A"),
    ("B", CITIES, "B"),
    ("B", LABELLED, "B"),
    (1, LABELLED, "B"),
    ("2", NUMBERED, "B"),
    (1, TABLES, "B"),
    ("B", {"A": "London", "B": "Paris"}, "B"),
    ("4", ["3", "4", "5"], "B"),
]
INVALID_CHOICE_GOLDS: list[tuple[Any, Any, str]] = [  # gold, choices, part of the error
    (1, None, "no 'choices'"),
    ("1", None, "no 'choices'"),
    (3, CITIES, "numbered from 0 to 2"),
    (-1, CITIES, "numbered from 0 to 2"),
    ("1", ["0", "2", "1"], "the text of another one"),
    ("D", CITIES, "none of the letters ABC"),
    ("Z", None, "none of the letters ABCDEFGHIJ"),
    ("Berlin", CITIES, "none of the row's choices"),
    ("Paris", None, "the row has no choices"),
    (True, CITIES, "not a letter"),
    (None, CITIES, "null"),
    (["B"], CITIES, "a list"),
    ("", CITIES, "empty"),
]
ROWS = tomllib.loads((Path(__file__).parent / "unsupported.toml").read_text())["unsupported"]
USUAL = """
import asyncio
import math
import unittest
from datetime import date
from unittest import mock

import pytest
from solution import Stack, add
import solution as s

@pytest.fixture(params=[1, 2], ids=["one", "two"])
def filled(request):
    yield Stack([request.param])

@pytest.mark.parametrize("a,b", [(1, 2), pytest.param(3, 4, id="x", marks=pytest.mark.xfail)])
def test_add(a, b):
    assert add(a, b) == pytest.approx(a + b)

class TestStack:
    def setup_method(self):
        self.stack = Stack()

    def test_filled(self, filled, capsys, monkeypatch):
        assert len(filled) == 1

    @mock.patch("solution.add")
    def test_patched(self, added):
        s.run()
        added.assert_called_once()

class Cases(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.day = date(2020, 1, 1)

    def test_sub(self):
        with self.subTest(x=1):
            self.assertAlmostEqual(s.f(1), math.pi)

@pytest.mark.asyncio
async def test_waits():
    assert await s.wait() == 1
    async with s.Connection() as connection:
        assert [row async for row in connection.rows()] == [await connection.first()]

def test_runs():
    async def work(number):
        return number

    assert asyncio.run(s.each(work, [1, 2])) == [1, 2]
"""
PARAMETRIZED = """
import pytest
from pytest import mark
N = "a,b"
cases = pytest.mark.parametrize("a", [1])
both = mark.parametrize(N, [(1, 2)])
"""


def test_choice_golds_are_parsed_to_letters() -> None:
    for gold, choices, expected in CHOICE_GOLDS:
        row = {"answer": gold} | ({} if choices is None else {"choices": choices})
        assert parse_choice_gold(row, {}) == expected, row


def test_golds_without_a_matching_choice_are_rejected() -> None:
    for gold, choices, error in INVALID_CHOICE_GOLDS:
        row = {"answer": gold} | ({} if choices is None else {"choices": choices})
        with pytest.raises(InvalidGold, match=error) as refused:
            parse_choice_gold(row, {})
        assert refused.value.fix, row


def test_text_golds_are_parsed_or_rejected() -> None:
    for gold, expected in ((42, "42"), (" Paris ", "Paris"), (3.5, "3.5"), ("None", "None")):
        assert parse_text_gold({"gold": gold}, {"answer": "gold"}) == expected
    errors_by_gold: dict[Any, str] = {
        42.0: "a number with a point",
        1e30: "a number with a point",
        "  ": "empty",
    }
    errors_by_gold |= {None: "null"}
    for gold, error in errors_by_gold.items():
        with pytest.raises(InvalidGold, match=error):
            parse_text_gold({"answer": gold}, {})
    for value in (["42"], {"value": 42}):
        with pytest.raises(InvalidGold, match="not a text"):
            parse_text_gold({"answer": value}, {})
    with pytest.raises(InvalidGold, match="no 'answer'"):
        parse_text_gold({}, {})


def test_math_golds_are_parsed_or_rejected() -> None:
    solution = "She sells 72.\n#### 72"
    for gold, expected in ((42, "42"), (42.0, "42"), (solution, "72"), (r"\{1,2\}", r"\{1,2\}")):
        assert parse_math_gold({"answer": gold}, {}) == expected
    errors_by_gold: dict[Any, str] = {
        r"\frac{1}{2": "braces",
        "eval(7)": "eval",
        "7" * 3000: "characters",
        None: "null",
    }
    for gold, error in errors_by_gold.items():
        with pytest.raises(InvalidGold, match=error):
            parse_math_gold({"answer": gold}, {})


@pytest.mark.parametrize(
    "source",
    [
        "@cases\ndef test_f(a): pass",
        "@both\ndef test_f(a, b): pass",
        "pytestmark = pytest.mark.parametrize('c', [1])\ndef test_f(c): pass",
        "@pytest.mark.parametrize(N, [(1, 2)])\ndef test_f(a, b): pass",
        "@mark.parametrize(argvalues=[1], argnames='c')\ndef test_f(c): pass",
        "@pytest.mark.parametrize()\ndef test_f(c): pass",
    ],
)
def test_parametrized_arguments_are_not_fixtures(source: str) -> None:
    assert find_unsupported(PARAMETRIZED + source) == ()
    assert pytest_support.find_missing_plugins(PARAMETRIZED + source) == ()


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.parametrize(argvalues=[1], argnames='c')\ndef test_f(c, d): pass",
        "@pytest.mark.parametrize('c', [1])\ndef test_f(c, d): pass",
    ],
)
def test_argument_without_a_mark_is_a_fixture(source: str) -> None:
    assert find_unsupported("import pytest\n" + source) == ("fixture d",)
    assert pytest_support.find_missing_plugins("import pytest\n" + source) == ("the fixture d",)


def test_common_tests_and_optional_imports_are_supported() -> None:
    assert find_unsupported(USUAL) == ()
    source = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\ndef test_f(): pass"
    assert find_unsupported(source) == ()


@pytest.mark.parametrize("row", ROWS, ids=[row["named"] for row in ROWS])
def test_unsupported_features_are_named(row: dict[str, str]) -> None:
    assert row["named"] in find_unsupported(row["source"])


def test_missing_column_is_named_with_the_existing_ones() -> None:
    assert styles.get_tests({"tests": "x"}, "tests") == "x"
    with pytest.raises(
        InvalidTests, match=r"no 'tests', .* options.tests names; it has 'a', 'test'"
    ):
        styles.get_tests({"a": 1, "test": "x"}, "tests")
