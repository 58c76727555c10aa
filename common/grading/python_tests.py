"""Finder of the tests of a Python module, as pytest would find them in its source."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SOLUTION_MODULE = "solution"  # module from which tests import the program
TEST_CASE_CLASSES = ("TestCase", "IsolatedAsyncioTestCase")
ANY_ARGUMENT = "*"  # stands for an argument whose name is not in the source
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NameResolver = Callable[[ast.expr], str]  # last name of the path of an expression


@dataclass(frozen=True)
class PythonTest:
    """Test in a source file."""

    name: str  # "test_a", "TestB::test_c", without parameters
    node: FunctionNode
    owner: ast.ClassDef | None
    is_unittest: bool  # of a `unittest.TestCase`

    @property
    def decorators(self) -> list[ast.expr]:
        """Decorators of the test and of its class."""
        return [*self.node.decorator_list, *(self.owner.decorator_list if self.owner else ())]

    def list_required_arguments(self, filled: int) -> list[str]:
        """Return the names of arguments without a default, after the first `filled` ones."""
        names = [argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args)]
        return names[: len(names) - len(self.node.args.defaults)][filled:]


def parse_source(source: str) -> ast.Module | None:
    """Return the syntax tree of a source; None if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in string literals
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def list_test_names(tests: str) -> list[str]:
    """Return the names of the tests, each once; raise SyntaxError or ValueError if it is no Python.

    Tests that a class inherits from another module, and those that are made at run time, are not
    found; no part of the module runs.
    """
    return list(dict.fromkeys(test.name for test in find_tests(ast.parse(tests))))


def get_last_name(expression: ast.expr) -> str:
    """Return the last part of a dotted name; empty for any other expression."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def find_tests(
    tree: ast.Module, resolve_name: NameResolver = get_last_name
) -> Iterator[PythonTest]:
    """Yield the tests; an overridden one appears twice."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def inside(
        body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None, case: bool
    ) -> Iterator[PythonTest]:
        for node in body:
            if isinstance(node, FunctionNode) and node.name.startswith("test"):
                yield PythonTest(prefix + node.name, node, owner, case)
            elif isinstance(node, ast.ClassDef):
                own = [node]  # and its base classes in the same source, each once
                for one in own:
                    above = (classes.get(get_last_name(base)) for base in one.bases)
                    own += [each for each in above if each is not None and each not in own]
                of_case = any(
                    resolve_name(base) in TEST_CASE_CLASSES for one in own for base in one.bases
                )
                if of_case or node.name.startswith("Test"):
                    for one in own:
                        yield from inside(one.body, f"{prefix}{node.name}::", node, of_case)

    yield from inside(tree.body, "", None, False)


def find_fixture_names(node: FunctionNode, is_fixture: Callable[[ast.expr], bool]) -> Iterator[str]:
    """Yield the names of the fixture that a function is; `is_fixture` recognises its decorators."""
    for decorator in node.decorator_list:
        if is_fixture(get_callee(decorator)):
            yield node.name
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def get_callee(expression: ast.expr) -> ast.expr:
    """Return the callee of a call; return any other expression unchanged."""
    return expression.func if isinstance(expression, ast.Call) else expression


def get_parametrized_arguments(mark: ast.Call) -> set[str]:
    """Return the arguments that a call of `parametrize` fills; ANY if the source does not name
    them.
    """
    by_name = (keyword.value for keyword in mark.keywords if keyword.arg == "argnames")
    named = mark.args[0] if mark.args else next(by_name, None)
    if isinstance(named, ast.Constant) and isinstance(named.value, str):
        return {name.strip() for name in named.value.split(",")}
    if isinstance(named, ast.List | ast.Tuple):
        return {str(e.value) if isinstance(e, ast.Constant) else ANY_ARGUMENT for e in named.elts}
    return {ANY_ARGUMENT}


def has_indirect_marks(tree: ast.Module) -> bool:
    """Return True if a mark is made anywhere but as a decorator, as in `pytestmark = ...`.

    It is then uncertain which tests have the mark.
    """
    decorating = {
        id(decorator.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "parametrize"
        and id(node) not in decorating
        for node in ast.walk(tree)
    )
