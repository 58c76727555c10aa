"""Reads which tests a module of tests in Python has, as pytest would find them in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

SOLUTION = "solution"  # the module that tests import the program from
_CASES = ("TestCase", "IsolatedAsyncioTestCase")


@dataclass(frozen=True)
class Suite:
    """What a module of tests says of itself; nothing of it is run."""

    tests: list[str]  # "test_a", "TestB::test_c": each once, whatever its parameters


def read(tests: str) -> Suite:
    """SyntaxError or ValueError when it is no Python. Tests that a class inherits from another
    module, and those that are made when it runs, are not seen.
    """
    tree = ast.parse(tests)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return Suite(list(dict.fromkeys(_in(tree.body, "", classes))))


def _in(body: list[ast.stmt], prefix: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test"):
                yield prefix + node.name
        elif isinstance(node, ast.ClassDef):
            own = _family(node, classes)
            case = any(_last(base) in _CASES for one in own for base in one.bases)
            if case or node.name.startswith("Test"):
                for one in own:
                    yield from _in(one.body, f"{prefix}{node.name}::", classes)


def _family(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class and those of the same source that it inherits from, each once."""
    found = [node]
    for one in found:
        bases = (classes.get(_last(base)) for base in one.bases)
        found += [base for base in bases if base is not None and base not in found]
    return found


def _last(base: ast.expr) -> str:
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""
