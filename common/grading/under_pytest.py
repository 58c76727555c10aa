"""Says of tests in Python what the runner `pytest` will not find: modules, fixtures, plugins."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator

from meshrl.common.grading import suites
from meshrl.common.grading.suites import ANY, SOLUTION, Function, called

# Of pytest itself; plugins bring further ones.
_FIXTURES = (
    "cache capfd capfdbinary caplog capsys capsysbinary capteesys doctest_namespace monkeypatch "
    "pytestconfig pytester record_property record_testsuite_property record_xml_attribute recwarn "
    "request subtests testdir tmp_path tmp_path_factory tmpdir tmpdir_factory"
)
FIXTURES = frozenset(_FIXTURES.split())
PRESENT = frozenset({SOLUTION, "pytest", "_pytest"})
_HOOKS = ("pytest_generate_tests", "pytest_plugins")  # with them, names come from anywhere


def modules(tests: str) -> tuple[str, ...]:
    """The packages beside the standard library that every run of these tests imports; relative
    imports are named with their dots. SyntaxError or ValueError if it is no Python.
    """
    found: dict[str, None] = {}
    for node in _always(ast.parse(tests).body):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        firsts = (name if name.startswith(".") else name.partition(".")[0] for name in names)
        found |= dict.fromkeys(n for n in firsts if n not in {*PRESENT, *sys.stdlib_module_names})
    return tuple(found)


def lacks(tests: str) -> tuple[str, ...]:
    """What takes a plugin of pytest: fixtures that neither pytest nor the source has, and async
    tests. Only what is certain is named; the rest shows when pytest collects the tests.
    """
    tree = ast.parse(tests)
    if any(hook in tests for hook in _HOOKS):
        return ()
    anywhere = suites.marks_elsewhere(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    makes = [suites.fixtures(node, lambda made: "fixture" in _dotted(made)) for node in functions]
    made = set(itertools.chain.from_iterable(makes))
    found: dict[str, None] = {}
    for test in suites.find(tree):
        node, owner = test.node, test.owner
        plain = all(_dotted(called(d)).startswith("pytest.mark.") for d in node.decorator_list)
        if not plain or test.name.count("::") > 1 or (owner and owner.bases):
            continue
        given: set[str] = set()
        for mark in test.marks:
            if isinstance(mark, ast.Call) and _dotted(mark.func).endswith("parametrize"):
                given |= suites.parametrized(mark)
        for name in test.arguments(1 if owner else 0):
            if name not in FIXTURES | made | given and not (anywhere or ANY in given):
                found[f"the fixture {name}"] = None
        if isinstance(node, ast.AsyncFunctionDef):
            found[f"async def {node.name}"] = None
    return tuple(found)


def _always(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module that are run whatever happens."""
    for node in body:
        if isinstance(node, ast.With | ast.AsyncWith):
            yield from _always(node.body)
        else:
            yield node


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
