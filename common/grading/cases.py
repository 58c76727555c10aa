"""Parser of a row's tests that are cases: of a program's output, or of calls of a function.

It supports the shapes of the public corpora whose meaning is certain. Values that are no tests
raise InvalidTests, and tests that no runner could grade by raise UnsupportedTests: neither is ever
a score.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.grading.isolated_support import UnsupportedTests
from meshrl.common.grading.python_tests import parse_source

MAX_DEPTH = 200  # nesting of one value; equal to the limit in `jail/wire/plain_data.py`
MAX_DIGITS = 100_000  # of an integer in JSON text; parsing more would delay all other calls
DIGITS_PER_CHUNK = 4_000  # digits per call of `int`, below its own limit
SCALAR_TYPES = {bool, int, float, str, type(None)}
LINKED_NODE_TYPES = ("ListNode", "TreeNode")  # types of arguments that a corpus builds from lists
SOLUTION_MODULE = "solution"  # the module that tests in Python import
FUNCTION_KEYS = ("function", "fn_name")


class InvalidTests(Exception):
    """Error of a row whose tests are invalid."""


@dataclass(frozen=True)
class StdioCase:
    """Input of a program, and the texts of which it is to print one."""

    stdin: str
    accepted_outputs: tuple[str, ...]


@dataclass(frozen=True)
class FunctionCase:
    """Call, and the JSON values of which it is to return one."""

    args: list[Any]
    accepted_results: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StdioTests:
    """Cases of a program."""

    cases: list[StdioCase]


@dataclass(frozen=True)
class FunctionTests:
    """Cases of one function, or of `Class.method`."""

    function: str
    cases: list[FunctionCase]


Tests = str | StdioTests | FunctionTests  # a text has tests in Python


def parse_tests(tests: Any) -> Tests:
    """Parse a row's `tests`, of any shape.

    Raise InvalidTests with the reason if they are invalid, UnsupportedTests if they cannot be
    graded by.
    """
    if isinstance(tests, str):
        if not tests.lstrip().startswith(("{", "[")):
            return tests
        try:  # datasets store lists and tables as JSON text
            found = _load_json(tests)
        except (ValueError, RecursionError):
            return tests
        return parse_tests(found)
    if isinstance(tests, list):
        if tests and all(isinstance(case, str) for case in tests):
            return _write_assertion_tests(tests)
        return StdioTests([_parse_stdio_case(case) for case in tests])
    if not isinstance(tests, dict):
        raise InvalidTests(f"tests must be a list, a table or a text, not {_describe_type(tests)}")
    function = next((str(tests[key]) for key in FUNCTION_KEYS if tests.get(key)), "")
    _reject_linked_nodes(tests)
    if "cases" in tests:
        cases = _require_list(tests["cases"], "cases")
        if function:
            return FunctionTests(function, [_parse_function_case(case) for case in cases])
        return StdioTests([_parse_stdio_case(case) for case in cases])
    pairs = list(_pair_inputs_with_outputs(tests))
    if function:
        return FunctionTests(function, _parse_function_pairs(pairs))
    return StdioTests(
        [StdioCase(_parse_text(a, "an input"), (_parse_text(b, "an output"),)) for a, b in pairs]
    )


def _write_assertion_tests(assertions: list[str]) -> str:
    """Return Python tests of a list of assertions, a shape of MBPP: one test for each."""
    source = [f"from {SOLUTION_MODULE} import *"]
    for n, assertion in enumerate(assertions):
        tree = parse_source(assertion)
        if tree is None or [type(node) for node in tree.body] != [ast.Assert]:
            raise InvalidTests(f"a list of texts must be assertions, and {assertion!r:.60} is none")
        source.append(f"def test_{n}():\n    {ast.unparse(tree)}")
    return "\n\n".join(source) + "\n"


def find_required_names(tests: Tests) -> frozenset[str]:
    """Return the names of which a program must define one, as far as its tests show."""
    if isinstance(tests, FunctionTests):
        return frozenset({tests.function.partition(".")[0]})
    if isinstance(tests, StdioTests):
        return frozenset()
    if (tree := parse_source(tests)) is None:  # reported when the tests run
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION_MODULE:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == SOLUTION_MODULE else set()
    if "*" in found:  # names that the tests use and do not define
        used, bound = find_used_and_bound_names(tree)
        found = (found - {"*"}) | (used - bound - set(dir(builtins)))
    return frozenset(found)


def find_used_and_bound_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a program reads, and those that it binds anywhere."""
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


# ---- programs
# -------------------------------------------------------------------------------------


def _parse_stdio_case(case: Any) -> StdioCase:
    case = _require_dict(case)
    if case.get("testtype") == "functional":
        fix = 'write {"function": NAME, "cases": [...]}'
        raise UnsupportedTests(f"a case with testtype functional names no function: {fix}")
    stdin = _parse_text(_require_key(case, "input"), "an input")
    if "outputs" in case:  # any of these outputs is right
        outputs = _require_list(case["outputs"], "outputs")
        if not outputs:
            raise InvalidTests("the outputs of a case are an empty list")
        return StdioCase(stdin, tuple(_parse_text(output, "an output") for output in outputs))
    return StdioCase(stdin, (_parse_text(_require_key(case, "output"), "an output"),))


def _parse_text(value: Any, what: str) -> str:
    """Return a text; a list is joined as lines, as in APPS."""
    if isinstance(value, list):
        if all(isinstance(line, str) for line in value):
            return "\n".join(value)
        raise UnsupportedTests(f"{what} of a program is a list of values other than lines")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise InvalidTests(f"{what} of a program must be a text, not {_describe_type(value)}")


# ---- calls --------------------------------------------------------------------------------------


def _parse_function_case(case: Any) -> FunctionCase:
    case = _require_dict(case)
    _reject_linked_nodes(case)
    if "args" in case:
        args = _check_json_value(_require_list(case["args"], "args"))
        kwargs = _check_json_value(_require_dict(case.get("kwargs") or {}))
        return FunctionCase(args, [_check_json_value(_require_key(case, "output"))], kwargs)
    given, expected = _require_key(case, "input"), _require_key(case, "output")
    if isinstance(given, str) and isinstance(expected, str):
        return FunctionCase(_parse_json_lines(given), [_parse_json_value(expected)])
    raise InvalidTests("a case of a function needs a list of args")


def _parse_function_pairs(pairs: list[tuple[Any, Any]]) -> list[FunctionCase]:
    if all(isinstance(given, str) and isinstance(expected, str) for given, expected in pairs):
        return [
            FunctionCase(_parse_json_lines(given), [_parse_json_value(expected)])
            for given, expected in pairs
        ]
    # Corpora of this shape wrap each result in a list, or none; the row does not show which.
    wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in pairs)
    cases = []
    for given, expected in pairs:
        args, value = (
            _check_json_value(_require_list(given, "inputs of a function")),
            _check_json_value(expected),
        )
        cases.append(FunctionCase(args, [value[0], value] if wrapped else [value]))
    return cases


def _parse_json_lines(text: str) -> list[Any]:
    """Parse arguments, one JSON value per line, as in LiveCodeBench."""
    return [_parse_json_value(line) for line in text.splitlines() if line.strip()]


def _parse_json_value(text: str) -> Any:
    try:
        return _check_json_value(_load_json(text))
    except ValueError as error:
        raise InvalidTests(f"an argument or result is not JSON: {text[:80]!r}") from error


def _check_json_value(value: Any, depth: int = 0) -> Any:
    """Return the value if JSON can represent it."""
    if depth > MAX_DEPTH:
        raise UnsupportedTests(f"a value is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= SCALAR_TYPES:
            return list(value)
        return [_check_json_value(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) and key[:1] != "\0" for key in value):
            raise UnsupportedTests(
                "a table has keys that are not text or begin with a null character"
            )
        return {key: _check_json_value(item, depth + 1) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise UnsupportedTests(
        f"{_describe_type(value)} as argument or result of a function has no JSON form"
    )


def _reject_linked_nodes(table: dict[str, Any]) -> None:
    """Raise UnsupportedTests if a mark beside the cases declares lists as linked nodes."""
    cases = {"cases", "args", "kwargs", "input", "output", "inputs", "outputs"}
    marks = repr({key: value for key, value in table.items() if key not in cases})
    if name := next((name for name in LINKED_NODE_TYPES if name in marks), ""):
        raise UnsupportedTests(
            f"arguments or results of the type {name}, which is built from lists, are not supported"
        )


# ---- tables and JSON ----------------------------------------------------------------------------


def _pair_inputs_with_outputs(tests: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    if not ("inputs" in tests and "outputs" in tests):
        keys = ", ".join(map(repr, tests)) or "nothing"
        what = "function and cases, or inputs and outputs"
        raise InvalidTests(f"a table of tests needs {what}; it has {keys}")
    inputs, outputs = (
        _require_list(tests["inputs"], "inputs"),
        _require_list(tests["outputs"], "outputs"),
    )
    if len(inputs) != len(outputs):
        raise InvalidTests(f"there are {len(inputs)} inputs but {len(outputs)} outputs")
    return zip(inputs, outputs, strict=True)


def _require_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise InvalidTests(f"a case must be a table, not {_describe_type(value)}")


def _require_list(value: Any, what: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    raise InvalidTests(f"{what} must be a list, not {_describe_type(value)}")


def _require_key(case: dict[str, Any], key: str) -> Any:
    if key in case:
        return case[key]
    raise InvalidTests(f"a case has no {key!r}")


def _describe_type(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _load_json(text: str) -> Any:
    return json.loads(text, parse_int=parse_integer)


def parse_integer(text: str) -> int:
    """Parse decimal digits of any length; raise UnsupportedTests beyond MAX_DIGITS of them."""
    if len(text) > MAX_DIGITS:
        raise UnsupportedTests(f"a whole number has {len(text)} digits; the limit is {MAX_DIGITS}")
    if len(text) <= DIGITS_PER_CHUNK:
        return int(text)
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text)
    middle = len(digits) // 2
    high, low = parse_integer(digits[:-middle]), parse_integer(digits[-middle:])
    return sign * (high * int(10**middle) + low)
