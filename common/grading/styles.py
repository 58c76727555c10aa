"""Classification of a row's tests by style, with the errors of tests that no program can pass."""

from __future__ import annotations

import functools
from typing import Any

from meshrl.common.grading import cases, python_tests
from meshrl.common.grading.cases import FunctionTests, InvalidTests, Tests
from meshrl.common.grading.row_values import format_keys, get_value, has_value

LEETCODE_CLASS = "Solution"  # LeetCode's class, whose methods are called
HUMANEVAL_CHECK = "def check("  # HumanEval's function, which another function has to call
CACHED_MODULES = 1024  # cached modules of tests: a group's answers share a row
STDIN, CALLS, PYTHON = "stdin", "calls", "Python"


def get_tests(row: dict[str, Any], name: str) -> Any:
    """Return the row's value under the name of the option `tests`; raise InvalidTests without
    one.
    """
    if has_value(row, name):
        return get_value(row, name)
    raise InvalidTests(
        f"the row has no {name!r}, which options.tests names; it has {format_keys(row)}"
    )


def classify_tests(tests: Any) -> tuple[str, Tests]:
    """Return the style, and the parsed tests.

    Raise InvalidTests if they are invalid, UnsupportedTests if no runner could grade by them.
    """
    found = cases.parse_tests(tests)
    if isinstance(found, str):
        _check_python_tests(found)
        return PYTHON, found
    if not found.cases:
        raise InvalidTests("the tests have no case")
    if isinstance(found, FunctionTests):
        if not all(part.isidentifier() for part in found.function.split(".")):
            raise InvalidTests(
                f"{found.function!r:.60} is not the name of a function or Class.method"
            )
        if found.function == LEETCODE_CLASS:
            what = f"{LEETCODE_CLASS} is a class and cannot be called"
            raise InvalidTests(f"{what}: use its method, {LEETCODE_CLASS}.NAME")
        return CALLS, found
    return STDIN, found


@functools.lru_cache(CACHED_MODULES)
def _check_python_tests(tests: str) -> None:
    if not tests.strip():
        raise InvalidTests("the tests are an empty text")
    try:
        found = python_tests.list_test_names(tests)
    except SyntaxError as error:
        if tests.lstrip()[:1] in ("{", "["):
            raise InvalidTests("the tests begin like JSON but are not valid JSON") from None
        raise InvalidTests(f"syntax error in Python, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidTests(f"the tests are not Python: {error or type(error).__name__}") from None
    if not found:
        begins = (
            " (the text begins like JSON but is not valid JSON)"
            if tests.lstrip()[:1] in "{["
            else ""
        )
        how = (
            "`def test_x(): check(NAME)`"
            if HUMANEVAL_CHECK in tests
            else "`def test_x(): assert ...`"
        )
        raise InvalidTests(
            f"the tests have no function test_*{begins}: write `from solution import NAME`, {how}"
        )
