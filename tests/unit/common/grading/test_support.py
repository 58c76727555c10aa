"""What the runner `isolated` cannot run is named by reading the tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from meshrl.common.grading import shapes, under_pytest
from meshrl.common.grading.cases import BadTests
from meshrl.common.grading.support import unsupported

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
def test_parameters_that_are_given_in_any_way_are_no_fixtures(source: str) -> None:
    assert unsupported(PARAMETRIZED + source) == ()
    assert under_pytest.lacks(PARAMETRIZED + source) == ()


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.parametrize(argvalues=[1], argnames='c')\ndef test_f(c, d): pass",
        "@pytest.mark.parametrize('c', [1])\ndef test_f(c, d): pass",
    ],
)
def test_what_no_mark_gives_is_a_fixture(source: str) -> None:
    assert unsupported("import pytest\n" + source) == ("fixture d",)
    assert under_pytest.lacks("import pytest\n" + source) == ("the fixture d",)


def test_usual_tests_are_supported() -> None:
    assert unsupported(USUAL) == ()


@pytest.mark.parametrize("row", ROWS, ids=[row["named"] for row in ROWS])
def test_what_cannot_be_run_is_named(row: dict[str, str]) -> None:
    assert row["named"] in unsupported(row["source"])


def test_an_import_that_may_fail_is_not_named() -> None:
    source = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\ndef test_f(): pass"
    assert unsupported(source) == ()


def test_a_column_that_is_missing_is_named_with_those_that_are_there() -> None:
    assert shapes.column({"tests": "x"}, "tests") == "x"
    with pytest.raises(BadTests, match=r"no 'tests', .* options.tests names; it has 'a', 'test'"):
        shapes.column({"a": 1, "test": "x"}, "tests")
