"""Check of Python tests for modules, fixtures and plugins that the runner `pytest` lacks."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator

from meshrl.common.grading import python_tests
from meshrl.common.grading.python_tests import (
    ANY_ARGUMENT,
    SOLUTION_MODULE,
    FunctionNode,
    get_callee,
)

# Fixtures of pytest itself; plugins add others.
_FIXTURE_LIST = (
    "cache capfd capfdbinary caplog capsys capsysbinary capteesys doctest_namespace monkeypatch "
    "pytestconfig pytester record_property record_testsuite_property record_xml_attribute recwarn "
    "request subtests testdir tmp_path tmp_path_factory tmpdir tmpdir_factory"
)
PYTEST_FIXTURES = frozenset(_FIXTURE_LIST.split())
AVAILABLE_MODULES = frozenset({SOLUTION_MODULE, "pytest", "_pytest"})
_HOOKS = ("pytest_generate_tests", "pytest_plugins")  # names may come from any module


def list_imported_packages(tests: str) -> tuple[str, ...]:
    """Return the packages beside the standard library that every run of these tests imports.

    Relative imports are named with their dots. Raise SyntaxError or ValueError if it is no Python.
    """
    found: dict[str, None] = {}
    for node in _iter_unconditional(ast.parse(tests).body):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        firsts = (name if name.startswith(".") else name.partition(".")[0] for name in names)
        found |= dict.fromkeys(
            n for n in firsts if n not in {*AVAILABLE_MODULES, *sys.stdlib_module_names}
        )
    return tuple(found)


def find_missing_plugins(tests: str) -> tuple[str, ...]:
    """Return features that need a plugin of pytest: unknown fixtures and async tests.

    A fixture is unknown if neither pytest nor the source has it. Only certain cases are named;
    others show when pytest collects the tests.
    """
    tree = ast.parse(tests)
    if any(hook in tests for hook in _HOOKS):
        return ()
    anywhere = python_tests.has_indirect_marks(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]
    makes = [
        python_tests.find_fixture_names(
            node, lambda decorator: "fixture" in _get_dotted_name(decorator)
        )
        for node in functions
    ]
    fixture_names = set(itertools.chain.from_iterable(makes))
    found: dict[str, None] = {}
    for test in python_tests.find_tests(tree):
        node, owner = test.node, test.owner
        plain = all(
            _get_dotted_name(get_callee(d)).startswith("pytest.mark.") for d in node.decorator_list
        )
        if not plain or test.name.count("::") > 1 or (owner and owner.bases):
            continue
        given: set[str] = set()
        for mark in test.decorators:
            if isinstance(mark, ast.Call) and _get_dotted_name(mark.func).endswith("parametrize"):
                given |= python_tests.get_parametrized_arguments(mark)
        for name in test.list_required_arguments(1 if owner else 0):
            if name not in PYTEST_FIXTURES | fixture_names | given and not (
                anywhere or ANY_ARGUMENT in given
            ):
                found[f"the fixture {name}"] = None
        if isinstance(node, ast.AsyncFunctionDef):
            found[f"async def {node.name}"] = None
    return tuple(found)


def _iter_unconditional(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements of a module that always run."""
    for node in body:
        if isinstance(node, ast.With | ast.AsyncWith):
            yield from _iter_unconditional(node.body)
        else:
            yield node


def _get_dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_get_dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
