"""Python tests under the real pytest: scores, and manipulations that have no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from meshrl.services.sandbox.grading.code.pytest_tests import PytestJails
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter, add_pytest
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.outcomes import CallResult
from tests.load import scaled
from tests.unit.sandbox.grading.graders import grade, read_rows
from tests.unit.sandbox.launching import open_launcher

pytestmark = [pytest.mark.needs("bwrap"), pytest.mark.group("real pytest")]
ADD = "def add(a, b):\n    return a + b\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suites(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PytestJails]:
    log = tmp_path_factory.mktemp("suites") / "jails.log"
    interpreter = add_pytest(Interpreter.default())
    async with open_launcher(
        log, interpreter=interpreter, homes=cgroups.find_parents()
    ) as launcher:
        await launcher.start()
        yield PytestJails(launcher)


async def grade_with_pytest(
    suites: PytestJails, tests: str, source: str, **options: Any
) -> CallResult:
    options = {"runner": "pytest", **options}
    return await grade(suites.launcher, tests, source, suites, **options)


COMMON_TESTS = """
import pytest, unittest
from solution import add

STATE = []

@pytest.fixture(scope="module")
def started():
    STATE.append(1)
    yield STATE
    STATE.clear()

@pytest.mark.parametrize("a, b, c", [(1, 2, 3), (2, 2, 4), (1, 1, 3)], ids="xyz")
def test_sums(a, b, c):
    assert add(a, b) == c

class TestMore:
    def test_files(self, tmp_path, capsys, caplog, started):
        (tmp_path / "x").write_text(str(add(1, 1)))
        print((tmp_path / "x").read_text())
        assert capsys.readouterr().out == "2\\n" and started == [1]

class Case(unittest.TestCase):
    def setUp(self):
        self.two = 2
    def test_case(self):
        self.assertEqual(add(self.two, self.two), 4)

def test_after(started):
    assert len(STATE) == 1
"""
OUTCOMES = """
import pytest
from solution import add
def test_passes(): assert add(1, 1) == 2
@pytest.mark.skip
def test_skipped(): pass
def test_skips(): pytest.skip("not now")
@pytest.mark.xfail
def test_xfails(): assert add(1, 1) == 3
@pytest.mark.xfail
def test_xpasses(): assert add(1, 1) == 2
@pytest.fixture
def torn():
    yield
    assert add(1, 1) == 3
def test_torn(torn): pass
"""


@pytest.mark.rotating(3)
@pytest.mark.asyncio(loop_scope="module")
async def test_score_is_the_share_of_passed_tests(suites: PytestJails) -> None:
    assert await grade_with_pytest(suites, COMMON_TESTS, ADD) == CallResult("ok", 5 / 6, "")
    assert await grade_with_pytest(suites, COMMON_TESTS, ADD, partial=False) == CallResult(
        "ok", 0.0, ""
    )
    assert await grade_with_pytest(suites, COMMON_TESTS, "def add(a, b): return 0") == CallResult(
        "ok", 1 / 6, ""
    )
    assert await grade_with_pytest(suites, COMMON_TESTS, "def sub(a, b): return 0") == CallResult(
        "ok", 0.0, ""
    )
    assert await grade_with_pytest(suites, OUTCOMES, ADD) == CallResult("ok", 1 / 6, "")


@pytest.mark.deep
@pytest.mark.asyncio(loop_scope="module")
async def test_hanging_or_exiting_test_fails_alone(suites: PytestJails) -> None:
    tests = "from solution import f\nimport pytest\n"
    tests += "@pytest.mark.parametrize('x', range(6))\ndef test_f(x): assert f(x) == x\n"
    source = "import os\ndef f(x):\n    while x == 2: pass\n    if x == 3: os._exit(0)\n"
    source += "    if x == 4: raise KeyboardInterrupt\n    return x"
    assert await grade_with_pytest(
        suites, tests, source, case_s=min(2.0, scaled(0.5))
    ) == CallResult("ok", 0.5, "")


FORGERIES = read_rows("../escapes/forged/pytest.toml", "forgery")
JUDGE = """
import unittest
from solution import add
def test_small(): assert add(2, 3) == 5
def test_close(): assert abs(add(1, 1) - 2) < 1e-9
def test_all(): assert all([add(x, 1) == x + 1 for x in range(3)])
class Case(unittest.TestCase):
    def test_case(self): self.assertEqual(add(4, 4), 8)
"""


PLAIN = "from solution import add\n" + "".join(
    f"def test_{a}(): assert add({a}, 40) == {a + 40}\n" for a in range(3)
)


@pytest.mark.rotating(3)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("forgery", FORGERIES, ids=[each["name"] for each in FORGERIES])
async def test_only_known_forgeries_get_a_reward(
    suites: PytestJails, forgery: dict[str, Any]
) -> None:
    if "paid" in forgery:
        assert (await grade_with_pytest(suites, PLAIN, forgery["source"])).value == 1.0
    else:
        assert await grade_with_pytest(suites, JUDGE, forgery["source"]) == CallResult(
            "ok", 0.0, ""
        )


@pytest.mark.asyncio(loop_scope="module")
async def test_tests_added_or_removed_by_a_program_have_no_effect(suites: PytestJails) -> None:
    assert (await grade_with_pytest(suites, JUDGE, ADD)).value == 1.0
    tests = "from solution import *\ndef test_add(): assert add(1, 1) == 2\n"
    added_tests = "def add(a, b): return 0\n" + "".join(f"def test_{i}(): pass\n" for i in range(9))
    assert (await grade_with_pytest(suites, tests, added_tests)).value == 0.0
    assert (await grade_with_pytest(suites, tests, ADD)).value == 1.0
    removed_tests = "def add(a, b): return a + b\ndef pytest_generate_tests(metafunc):\n"
    removed_tests += "    metafunc.parametrize('nothing', [])\n"
    assert (await grade_with_pytest(suites, tests, removed_tests)).value == 0.0


@pytest.mark.deep
@pytest.mark.asyncio(loop_scope="module")
async def test_tests_that_cannot_run_give_no_score(suites: PytestJails) -> None:
    for tests, status, text in (
        ("import numpy_like\ndef test_f(): pass", "unsupported", "numpy_like"),
        ("def test_f(nobody): pass", "unsupported", "the fixture nobody"),
        ("async def test_f(): pass", "unsupported", "async functions"),
        ("x = 1 / 0\ndef test_f(): pass", "bad_value", "ZeroDivisionError"),
        ("def test_f(:", "bad_value", "line 1"),
        ("def test_f(): yield", "bad_value", "yield"),
        ("while True: pass\ndef test_f(): pass", "bad_value", "does not collect the tests"),
    ):
        answer = await grade_with_pytest(suites, tests, ADD, case_s=min(4.0, scaled(1.0)))
        assert answer.status == status and text in answer.error, answer


@pytest.mark.asyncio(loop_scope="module")
async def test_auto_runner_uses_pytest_only_if_needed(suites: PytestJails) -> None:
    log_tests = "import logging\nfrom solution import add\n"
    log_tests += "def test_f(caplog):\n    logging.warning('x')\n"
    log_tests += "    assert caplog.text and add(1, 1) == 2\n"
    assert (await grade_with_pytest(suites, log_tests, ADD, runner="auto")).value == 1.0
    rejected = await grade_with_pytest(suites, log_tests, ADD, runner="isolated")
    assert rejected.status == "unsupported" and "fixture caplog" in rejected.error
    before = suites.launcher.started_count
    assert (await grade_with_pytest(suites, JUDGE, ADD, runner="auto")).value == 1.0
    # One jail each for the solution and the tests.
    assert suites.launcher.started_count == before + 2


@pytest.mark.asyncio(loop_scope="module")
async def test_unsupported_test_feature_selects_pytest(suites: PytestJails) -> None:
    tests = "import pytest\nfrom solution import add\n"
    tests += "def test_f():\n    assert getattr(pytest, 'ExitCode').OK == 0 and add(1, 1) == 2\n"
    assert (await grade_with_pytest(suites, tests, ADD, runner="auto")).value == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_program_cannot_choose_a_runner_that_it_can_forge(suites: PytestJails) -> None:
    tests = "from solution import Money\ndef test_money(): assert Money(5) == 5\n"
    money_class = "class Money:\n    def __init__(self, n): self.n = n\n"
    money_class += "    def __eq__(self, other): return self.n == other\n"
    for runner in ("auto", "isolated"):
        rejected = await grade_with_pytest(suites, tests, money_class, runner=runner)
        assert rejected.status == "unsupported" and "equality of a Money" in rejected.error
    class_source = "class Money:\n    def __init__(self, n): self.n = n\n"
    for method in (
        "__eq__ = lambda self, other: type(other) is int",
        "__lt__ = lambda self, other: type(other) is int",
    ):
        tests = f"from solution import Money\ndef test_money(): assert Money(5) {method[2:4]} 8\n"
        tests = tests.replace(" eq ", " == ").replace(" lt ", " < ")
        answer = await grade_with_pytest(
            suites, tests, f"{class_source}    {method}\n", runner="auto"
        )
        assert answer.status == "unsupported" and answer.value is None


@pytest.mark.asyncio(loop_scope="module")
async def test_tests_of_a_row_are_inspected_once(suites: PytestJails) -> None:
    tests, before = JUDGE + "# another row\n", suites.launcher.started_count
    answers = await asyncio.gather(*(grade_with_pytest(suites, tests, ADD) for _ in range(3)))
    assert [answer.value for answer in answers] == [1.0] * 3
    assert suites.launcher.started_count == before + 1 + 3
