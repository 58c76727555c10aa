"""Reads a row's tests that are cases: of a program that prints, or of calls of a function.

The shapes of the public corpora are understood where what they mean is certain. What is no test
at all is BadTests, and what no runner could judge by is Unsupported: neither is ever a score.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.grading.suites import parsed
from meshrl.common.grading.support import Unsupported

DEPTH = 200  # nesting of one value; the same as in `jail/wire/plain.py`
DIGITS = 100_000  # of a whole number in JSON text; reading more would hold up all other calls
CHUNK = 4_000  # digits that `int` reads at once, below where it refuses a text
SCALARS = {bool, int, float, str, type(None)}
LINKED = ("ListNode", "TreeNode")  # types of arguments that a corpus builds from lists
SOLUTION = "solution"  # the module that tests in Python import
FUNCTION_KEYS = ("function", "fn_name")


class BadTests(Exception):
    """The row's tests are none."""


@dataclass(frozen=True)
class Printed:
    """What a program reads, and the texts of which it is to print one."""

    stdin: str
    accepted: tuple[str, ...]


@dataclass(frozen=True)
class Called:
    """A call, and the JSON values of which it is to return one."""

    args: list[Any]
    accepted: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrintedTests:
    """Cases of a program."""

    cases: list[Printed]


@dataclass(frozen=True)
class CalledTests:
    """Cases of one function, or of `Class.method`."""

    function: str
    cases: list[Called]


Tests = str | PrintedTests | CalledTests  # a text is tests in Python


def read(tests: Any) -> Tests:
    """What a row's `tests` are, whichever shape they have.

    BadTests says why they are none, Unsupported what of them cannot be graded by.
    """
    if isinstance(tests, str):
        if not tests.lstrip().startswith(("{", "[")):
            return tests
        try:  # the list or table that a text is, as datasets store them
            found = _loads(tests)
        except (ValueError, RecursionError):
            return tests
        return read(found)
    if isinstance(tests, list):
        return PrintedTests([_printed_case(case) for case in tests])
    if not isinstance(tests, dict):
        raise BadTests(f"tests are a list, a table or a text, not {_kind(tests)}")
    function = next((str(tests[key]) for key in FUNCTION_KEYS if tests.get(key)), "")
    _no_linked(tests)
    if "cases" in tests:
        cases = _listed(tests["cases"], "cases")
        if function:
            return CalledTests(function, [_called(case) for case in cases])
        return PrintedTests([_printed_case(case) for case in cases])
    pairs = list(_pairs(tests))
    if function:
        return CalledTests(function, _called_pairs(pairs))
    return PrintedTests([Printed(_text(a, "an input"), (_text(b, "an output"),)) for a, b in pairs])


def names(tests: Tests) -> frozenset[str]:
    """What a program must define, as far as its tests say: one of these."""
    if isinstance(tests, CalledTests):
        return frozenset({tests.function.partition(".")[0]})
    if isinstance(tests, PrintedTests):
        return frozenset()
    if (tree := parsed(tests)) is None:  # told when they are to run
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == SOLUTION else set()
    if "*" in found:  # whatever they use and have from nowhere else
        used, bound = used_and_bound(tree)
        found = (found - {"*"}) | (used - bound - set(dir(builtins)))
    return frozenset(found)


def used_and_bound(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that a program reads, and those that it binds anywhere."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return used, bound


# ---- programs that print ------------------------------------------------------------------------


def _printed_case(case: Any) -> Printed:
    case = _table(case)
    if case.get("testtype") == "functional":
        fix = 'write {"function": NAME, "cases": [...]}'
        raise Unsupported(f"a case with testtype functional does not say of which function: {fix}")
    stdin = _text(_of(case, "input"), "an input")
    if "outputs" in case:  # any of them is right
        outputs = _listed(case["outputs"], "outputs")
        if not outputs:
            raise BadTests("a case whose outputs are an empty list")
        return Printed(stdin, tuple(_text(output, "an output") for output in outputs))
    return Printed(stdin, (_text(_of(case, "output"), "an output"),))


def _text(value: Any, what: str) -> str:
    """A text; a list is its lines, as in APPS."""
    if isinstance(value, list):
        if all(isinstance(line, str) for line in value):
            return "\n".join(value)
        raise Unsupported(f"{what} of a program that is a list of other things than lines")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise BadTests(f"{what} of a program is a text, not {_kind(value)}")


# ---- calls --------------------------------------------------------------------------------------


def _called(case: Any) -> Called:
    case = _table(case)
    _no_linked(case)
    if "args" in case:
        args = _plain(_listed(case["args"], "args"))
        kwargs = _plain(_table(case.get("kwargs") or {}))
        return Called(args, [_plain(_of(case, "output"))], kwargs)
    given, wanted = _of(case, "input"), _of(case, "output")
    if isinstance(given, str) and isinstance(wanted, str):
        return Called(_json_lines(given), [_value(wanted)])
    raise BadTests("a case of a function has a list of args")


def _called_pairs(pairs: list[tuple[Any, Any]]) -> list[Called]:
    if all(isinstance(given, str) and isinstance(wanted, str) for given, wanted in pairs):
        return [Called(_json_lines(given), [_value(wanted)]) for given, wanted in pairs]
    # Corpora of this shape wrap each result in a list, or none; which, the row does not say.
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in pairs)
    cases = []
    for given, wanted in pairs:
        args, value = _plain(_listed(given, "inputs of a function")), _plain(wanted)
        cases.append(Called(args, [value[0], value] if wrapped else [value]))
    return cases


def _json_lines(text: str) -> list[Any]:
    """Arguments, one JSON value a line, as in LiveCodeBench."""
    return [_value(line) for line in text.splitlines() if line.strip()]


def _value(text: str) -> Any:
    try:
        return _plain(_loads(text))
    except ValueError as error:
        raise BadTests(f"an argument or result that is not JSON: {text[:80]!r}") from error


def _plain(value: Any, depth: int = 0) -> Any:
    """The value, which JSON holds."""
    if depth > DEPTH:
        raise Unsupported(f"a value nested deeper than {DEPTH}")
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= SCALARS:
            return list(value)
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) and key[:1] != "\0" for key in value):
            raise Unsupported("a table with keys that are no text, or begin with a null character")
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise Unsupported(f"{_kind(value)} as argument or result of a function: JSON holds none")


def _no_linked(table: dict[str, Any]) -> None:
    """Unsupported if a mark beside the cases says that lists stand for linked nodes."""
    cases = {"cases", "args", "kwargs", "input", "output", "inputs", "outputs"}
    marks = repr({key: value for key, value in table.items() if key not in cases})
    if name := next((name for name in LINKED if name in marks), ""):
        raise Unsupported(f"arguments or results of the type {name}, which are built of lists")


# ---- tables and JSON ----------------------------------------------------------------------------


def _pairs(tests: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    if not ("inputs" in tests and "outputs" in tests):
        keys = ", ".join(map(repr, tests)) or "nothing"
        what = "function and cases, or inputs and outputs"
        raise BadTests(f"a table of tests has {what}; it has {keys}")
    inputs, outputs = _listed(tests["inputs"], "inputs"), _listed(tests["outputs"], "outputs")
    if len(inputs) != len(outputs):
        raise BadTests(f"{len(inputs)} inputs and {len(outputs)} outputs")
    return zip(inputs, outputs, strict=True)


def _table(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise BadTests(f"a case is a table, not {_kind(value)}")


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    raise BadTests(f"{what} are a list, not {_kind(value)}")


def _of(case: dict[str, Any], key: str) -> Any:
    if key in case:
        return case[key]
    raise BadTests(f"a case without {key!r}")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _loads(text: str) -> Any:
    return json.loads(text, parse_int=whole)


def whole(text: str) -> int:
    """The number that decimal digits spell, however many; Unsupported beyond DIGITS of them."""
    if len(text) > DIGITS:
        raise Unsupported(f"a whole number of {len(text)} digits; {DIGITS} at most")
    if len(text) <= CHUNK:
        return int(text)
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text)
    middle = len(digits) // 2
    high, low = whole(digits[:-middle]), whole(digits[-middle:])
    return sign * (high * int(10**middle) + low)
