"""What the runner `isolated` cannot run is named by reading the tests."""

from __future__ import annotations

import pytest

from common.grading import shapes, under_pytest
from common.grading.cases import BadTests
from common.grading.support import unsupported

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


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def test_f(:", "syntax error, line 1"),
        ("x = 1", "no test found"),
        ("import numpy as np\ndef test_f(): pass", "import numpy (not in the jail)"),
        ("from .a import b\ndef test_f(): pass", "import .a (a relative import)"),
        ("def test_f(caplog): pass", "fixture caplog"),
        ("def test_f(mocker): pass", "pytest-mock's mocker"),
        (
            "import pytest\nnp = pytest.importorskip('numpy')\ndef test_f(): pass",
            "pytest.importorskip('numpy')",
        ),
        ("import pytest\ndef test_f(): pytest.freeze_includes()", "pytest.freeze_includes"),
        (
            "import threading\ndef test_f(): pass",
            "import threading (threads that use the solution)",
        ),
        ("async def test_f(): pass", "async def test_f without pytest.mark.asyncio"),
        ("import inspect\ndef test_f(): inspect.stack()", "inspect.stack"),
        (
            "import asyncio\ndef test_f(): asyncio.run(asyncio.wait_for(f(), 1))",
            "asyncio.wait_for",
        ),
        (
            "import asyncio\nasync def both(): await asyncio.gather(f(), f())\n"
            "def test_f(): asyncio.run(both())",
            "asyncio.gather",
        ),
        (
            "from asyncio import Queue as Q, run\ndef test_f(): run(f(Q()))",
            "asyncio.Queue",
        ),
        (
            "import asyncio\nasync def work(): await asyncio.sleep(0)\ndef test_f(): f(work)",
            "asyncio.sleep",
        ),
        (
            "import asyncio\nasync def main(): asyncio.get_running_loop().create_task(f())\n"
            "def test_f(): asyncio.run(main())",
            "asyncio.get_running_loop().create_task",
        ),
        (
            "from solution import A\nclass B: pass\nclass C(A, B): pass\ndef test_f(): pass",
            "class C(A, B) of the solution's and of the tests'",
        ),
        (
            "import unittest\nclass A(unittest.TestCase):\n    def test_f(self):\n"
            "        with self.assertLogs(): pass",
            "assertLogs (what the solution logs)",
        ),
        (
            "import logging\nclass H(logging.StreamHandler): pass\n"
            "def test_f(): logging.getLogger('a').addHandler(H())",
            "class H(logging.StreamHandler) (what the solution logs)",
        ),
        (
            "from logging import getLogger, NullHandler\n"
            "def test_f(): getLogger('a').addHandler(NullHandler())",
            "addHandler (what the solution logs)",
        ),
        (
            "import sqlite3\nfrom solution import f\n"
            "def test_f(): assert f(sqlite3.connect(':memory:'))",
            "sqlite3.connect",
        ),
    ],
)
def test_what_cannot_be_run_is_named(source: str, named: str) -> None:
    assert named in unsupported(source)


def test_an_import_that_may_fail_is_not_named() -> None:
    source = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\ndef test_f(): pass"
    assert unsupported(source) == ()


def test_a_column_that_is_missing_is_named_with_those_that_are_there() -> None:
    assert shapes.column({"tests": "x"}, "tests") == "x"
    with pytest.raises(BadTests, match=r"no 'tests', .* options.tests names; it has 'a', 'test'"):
        shapes.column({"a": 1, "test": "x"}, "tests")
