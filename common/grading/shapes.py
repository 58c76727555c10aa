"""Says what style a row's tests are of, and what is wrong with their shape.

A list of {input, output} is for programs that read and print; a table with `function` and `cases`
is calls of a function; a text is a module of tests in Python.
"""

from __future__ import annotations

import json
from typing import Any

from common.grading import suites

STDIN, CALLS, PYTHON = "stdin", "calls", "Python"
_PLAIN = (str, int, float)


class Misshapen(ValueError):
    """A row's tests are none; the text says what of them, and what was due."""


def style(tests: Any) -> str:
    """stdin, calls or Python; Misshapen if they cannot be graded, whatever the program is."""
    if isinstance(tests, str):
        _python(tests)
        return PYTHON
    if isinstance(tests, dict):
        _calls(tests)
        return CALLS
    if isinstance(tests, list):
        _stdin(tests)
        return STDIN
    due = "a list of {input, output}, a table with function and cases, or Python source"
    raise Misshapen(f"{_kind(tests)} in place of {due}")


def _stdin(cases: list[Any]) -> None:
    if not cases:
        raise Misshapen("the list of cases is empty")
    for number, case in enumerate(cases, 1):
        if not isinstance(case, dict):
            raise Misshapen(f"case {number} is {_kind(case)}, not {{input, output}}")
        for key in ("input", "output"):
            if key not in case:
                raise Misshapen(f"case {number} has no {key!r}; it has {_names(case)}")
            if not isinstance(case[key], _PLAIN):
                raise Misshapen(f"case {number}: {key!r} is {_kind(case[key])}, not a text")


def _calls(tests: dict[str, Any]) -> None:
    for key in ("function", "cases"):
        if key not in tests:
            raise Misshapen(f"there is no {key!r}; it has {_names(tests)}")
    function, cases = tests["function"], tests["cases"]
    if not isinstance(function, str) or not all(p.isidentifier() for p in function.split(".")):
        raise Misshapen(f"'function' is {function!r:.60}, not a function's name or Class.method")
    if not isinstance(cases, list) or not cases:
        what = "empty" if cases == [] else f"{_kind(cases)}, not a list"
        raise Misshapen(f"'cases' is {what}")
    for number, case in enumerate(cases, 1):
        if not isinstance(case, dict):
            raise Misshapen(f"case {number} is {_kind(case)}, not {{args, output}}")
        for key in ("args", "output"):
            if key not in case:
                raise Misshapen(f"case {number} has no {key!r}; it has {_names(case)}")
        if not isinstance(case["args"], list):
            raise Misshapen(f"case {number}: 'args' is {_kind(case['args'])}, not a list")
        if not isinstance(case.get("kwargs", {}), dict):
            raise Misshapen(f"case {number}: 'kwargs' is {_kind(case['kwargs'])}, not a table")


def _python(tests: str) -> None:
    if not tests.strip():
        raise Misshapen("the text is empty")
    try:
        found = suites.read(tests).tests
    except SyntaxError as error:
        raise Misshapen(f"Python source, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Misshapen(f"no Python source: {error or type(error).__name__}") from None
    if found:
        return
    try:
        json.loads(tests)
    except ValueError:
        raise Misshapen("Python source without a function test_*") from None
    raise Misshapen("a text that holds JSON: write it as lists and tables, not as a text")


def _kind(value: Any) -> str:
    names = {type(None): "nothing", str: "a text", list: "a list", dict: "a table", bool: "a truth"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no data")


def _names(table: dict[str, Any]) -> str:
    return ", ".join(map(repr, list(table)[:8])) or "nothing"
