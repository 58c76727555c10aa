"""Finds which tests a module of tests in Python has, as pytest would find them in its source."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SOLUTION_MODULE = "solution"  # the module that tests import the program from
TEST_CASE_CLASSES = ("TestCase", "IsolatedAsyncioTestCase")
ANY_ARGUMENT = "*"  # in place of an argument's name: the source does not say which
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NameResolver = Callable[[ast.expr], str]  # the last name of what an expression means


@dataclass(frozen=True)
class PythonTest:
    """A test as its source says it."""

    name: str  # "test_a", "TestB::test_c": whatever its parameters
    node: FunctionNode
    owner: ast.ClassDef | None
    is_unittest: bool  # of a `unittest.TestCase`

    @property
    def decorators(self) -> list[ast.expr]:
        """The decorators of the test and of its class."""
        return [*self.node.decorator_list, *(self.owner.decorator_list if self.owner else ())]

    def list_required_arguments(self, filled: int) -> list[str]:
        """Return the names of arguments without a default, behind the first `filled` ones."""
        names = [argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args)]
        return names[: len(names) - len(self.node.args.defaults)][filled:]


def parse_source(source: str) -> ast.Module | None:
    """Return the syntax tree of a source; None if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its texts
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def list_test_names(tests: str) -> list[str]:
    """Return the names of the tests, each once. SyntaxError or ValueError when it is no Python.

    Tests that a class inherits from another module, and those that are made when it runs, are not
    seen; nothing of it is run.
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
    """Yield the tests; one that is overridden comes twice."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def inside(
        body: list[ast.stmt], prefix: str, owner: ast.ClassDef | None, case: bool
    ) -> Iterator[PythonTest]:
        for node in body:
            if isinstance(node, FunctionNode) and node.name.startswith("test"):
                yield PythonTest(prefix + node.name, node, owner, case)
            elif isinstance(node, ast.ClassDef):
                own = [node]  # and the classes of the same source that it inherits from, each once
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
    """Yield the names of the fixture that a function is; `makes` knows what makes one of it."""
    for decorator in node.decorator_list:
        if is_fixture(get_callee(decorator)):
            yield node.name
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def get_callee(expression: ast.expr) -> ast.expr:
    """Return what a call calls; any other expression as it is."""
    return expression.func if isinstance(expression, ast.Call) else expression


def get_parametrized_arguments(mark: ast.Call) -> set[str]:
    """The arguments that a call of `parametrize` gives; ANY where the source does not say which."""
    by_name = (keyword.value for keyword in mark.keywords if keyword.arg == "argnames")
    named = mark.args[0] if mark.args else next(by_name, None)
    if isinstance(named, ast.Constant) and isinstance(named.value, str):
        return {name.strip() for name in named.value.split(",")}
    if isinstance(named, ast.List | ast.Tuple):
        return {str(e.value) if isinstance(e, ast.Constant) else ANY_ARGUMENT for e in named.elts}
    return {ANY_ARGUMENT}


def has_indirect_marks(tree: ast.Module) -> bool:
    """Whether a mark is made anywhere but as a decorator, as in `pytestmark = ...`: then which
    tests have it is not certain.
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
