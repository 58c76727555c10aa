"""Says of what style a row's tests are, or what is wrong with them whatever a program answers."""

from __future__ import annotations

import functools
from typing import Any

from meshrl.common.grading import cases, suites
from meshrl.common.grading.cases import BadTests, CalledTests, Tests

CLASS = "Solution"  # of LeetCode, whose methods are called
CHECK = "def check("  # of HumanEval, which another function has to call
KNOWN = 1024  # modules of tests that are not read again: a group's answers share a row
STDIN, CALLS, PYTHON = "stdin", "calls", "Python"


def column(row: dict[str, Any], name: str) -> Any:
    """What a row has under the name that the option `tests` gives; BadTests if it has nothing."""
    if name in row:
        return row[name]
    has = ", ".join(map(repr, row)) or "nothing"
    raise BadTests(f"the row has no {name!r}, which options.tests names; it has {has}")


def read(tests: Any) -> tuple[str, Tests]:
    """The style, and what the tests are. BadTests if they are none, Unsupported if no runner could
    judge by them.
    """
    found = cases.read(tests)
    if isinstance(found, str):
        _python(found)
        return PYTHON, found
    if not found.cases:
        raise BadTests("there is no case")
    if isinstance(found, CalledTests):
        if not all(part.isidentifier() for part in found.function.split(".")):
            raise BadTests(f"{found.function!r:.60} is not the name of a function or Class.method")
        if found.function == CLASS:
            what = f"{CLASS} is a class, which is not called"
            raise BadTests(f"{what}: name its method, {CLASS}.NAME")
        return CALLS, found
    return STDIN, found


@functools.lru_cache(KNOWN)
def _python(tests: str) -> None:
    if not tests.strip():
        raise BadTests("an empty text")
    try:
        found = suites.read(tests)
    except SyntaxError as error:
        if tests.lstrip()[:1] in ("{", "["):
            raise BadTests("a text that begins like JSON, but is none") from None
        raise BadTests(f"syntax error in Python, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"no Python: {error or type(error).__name__}") from None
    if not found:
        begins = " and begins like JSON, which it is not" if tests.lstrip()[:1] in "{[" else ""
        how = "`def test_x(): check(NAME)`" if CHECK in tests else "`def test_x(): assert ...`"
        raise BadTests(
            f"Python without a function test_*{begins}: write `from solution import NAME`, {how}"
        )
