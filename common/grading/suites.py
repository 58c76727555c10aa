"""Finds which tests a module of tests in Python has, as pytest would find them in its source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SOLUTION = "solution"  # the module that tests import the program from
CASES = ("TestCase", "IsolatedAsyncioTestCase")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Named = Callable[[ast.expr], str]  # the last name of what an expression means


@dataclass(frozen=True)
class WrittenTest:
    """A test as its source says it."""

    name: str  # "test_a", "TestB::test_c": whatever its parameters
    node: Function
    owner: ast.ClassDef | None
    case: bool  # of a `unittest.TestCase`

    @property
    def marks(self) -> list[ast.expr]:
        """The decorators of the test and of its class."""
        return [*self.node.decorator_list, *(self.owner.decorator_list if self.owner else ())]

    def arguments(self, filled: int) -> list[str]:
        """Return the names of arguments without a default, behind the first `filled` ones."""
        names = [argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args)]
        return names[: len(names) - len(self.node.args.defaults)][filled:]


def read(tests: str) -> list[str]:
    """Return the names of the tests, each once. SyntaxError or ValueError when it is no Python.

    Tests that a class inherits from another module, and those that are made when it runs, are not
    seen; nothing of it is run.
    """
    return list(dict.fromkeys(test.name for test in find(ast.parse(tests))))


def last_name(expression: ast.expr) -> str:
    """Return the last part of a dotted name; empty for any other expression."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def find(tree: ast.Module, named: Named = last_name) -> Iterator[WrittenTest]:
    """Yield the tests; one that is overridden comes twice."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def inside(
        body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None, case: bool
    ) -> Iterator[WrittenTest]:
        for node in body:
            if isinstance(node, Function) and node.name.startswith("test"):
                yield WrittenTest(prefix + node.name, node, owner, case)
            elif isinstance(node, ast.ClassDef):
                own = _family(node, classes)
                of_case = any(named(base) in CASES for one in own for base in one.bases)
                if of_case or node.name.startswith("Test"):
                    for one in own:
                        yield from inside(one.body, f"{prefix}{node.name}::", node, of_case)

    yield from inside(tree.body, "", None, False)


def _family(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class and those of the same source that it inherits from, each once."""
    found = [node]
    for one in found:
        bases = (classes.get(last_name(base)) for base in one.bases)
        found += [base for base in bases if base is not None and base not in found]
    return found


def fixtures(node: Function, makes: Callable[[ast.expr], bool]) -> Iterator[str]:
    """Yield the names of the fixture that a function is; `makes` knows what makes one of it."""
    for decorator in node.decorator_list:
        if makes(called(decorator)):
            yield node.name
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def called(expression: ast.expr) -> ast.expr:
    """Return what a call calls; any other expression as it is."""
    return expression.func if isinstance(expression, ast.Call) else expression
