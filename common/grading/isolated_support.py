"""Check of Python tests for features that the runner `isolated` does not support.

It reads the syntax tree of a row's tests before any answer is scored by them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from meshrl.common.grading import python_tests
from meshrl.common.grading.python_tests import ANY_ARGUMENT

_PYTEST_NAME_LIST = (
    "raises approx fixture mark param fail skip xfail importorskip warns deprecated_call "
    "MonkeyPatch FixtureRequest CaptureFixture ExceptionInfo exit main"
)
SUPPORTED_PYTEST_NAMES = frozenset(_PYTEST_NAME_LIST.split())
SUPPORTED_FIXTURES = frozenset(
    {"capsys", "capfd", "monkeypatch", "request", "tmp_path", "tmp_path_factory"}
)
UNSUPPORTED_MARKS = {"anyio": "pytest-anyio", "trio": "pytest-trio"}

# Modules of the standard library that are meaningless if the solution runs in another process.
UNSUPPORTED_MODULES = {
    "threading": "threads that use the solution",
    "multiprocessing": "processes that use the solution",
    "concurrent": "threads that use the solution",
    "subprocess": "programs",
    "runpy": "programs",
    "shelve": "objects of the solution by value",
    "weakref": "references to objects of the solution",
    "gc": "objects of the solution's process",
    "tracemalloc": "memory of the solution's process",
    "socket": "the network",
    "tkinter": "a display",
    "doctest": "the solution's source",
}
# Coroutines of the two jails run one after another, each to its end: concurrency and yielding are
# meaningless there.
_CONCURRENT_NAME_LIST = (
    "gather create_task ensure_future TaskGroup Task as_completed wait wait_for shield timeout "
    "timeout_at to_thread run_coroutine_threadsafe sleep Future Queue LifoQueue PriorityQueue "
    "Event Lock Semaphore BoundedSemaphore Condition Barrier"
)
_LOOP_METHODS = frozenset({"create_task", "create_future", "call_soon", "call_later"})
_INSPECT_NAME_LIST = "getsourcelines getsourcefile getfile getmodule getcallargs stack currentframe"
UNSUPPORTED_CALLS = {
    "inspect": frozenset(_INSPECT_NAME_LIST.split()),
    "importlib": {"reload"},
    "asyncio": frozenset(_CONCURRENT_NAME_LIST.split()),
    "os": {"chdir", "fork", "system", "popen"},
    "sqlite3": {"connect"},  # the solution cannot use a connection of the tests
    "sys": {"getrefcount", "settrace", "setprofile", "_getframe", "setrecursionlimit"},
    "mock": {"create_autospec", "seal"},
}


LOG_LISTENERS = frozenset({"assertLogs", "assertNoLogs", "addHandler"})


class UnsupportedTests(Exception):
    """Error of tests that no runner of the job can run; its text names the unsupported feature.

    `is_caused_by_solution`: an object of the solution caused this, so another solution could
    avoid or cause it; otherwise the tests caused it.
    """

    def __init__(self, what: str, is_caused_by_solution: bool = False) -> None:
        super().__init__(what)
        self.is_caused_by_solution = is_caused_by_solution


def find_unsupported(tests: str) -> tuple[str, ...]:
    """Name each feature of Python tests that the runner `isolated` does not support.

    Examples: "fixture caplog", "import numpy (not in the jail)". They are in source order; empty if
    it can run all tests. The tests are parsed and not run. Features that only show at run time
    raise `UnsupportedTests` then.
    """
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        return (f"syntax error, line {error.lineno}",)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, nested too deep
        return (f"not Python: {type(error).__name__}",)
    return tuple(dict.fromkeys(UnsupportedFeatureFinder().find(tree)))


class UnsupportedFeatureFinder:
    """Finder of unsupported features in one module of tests."""

    def __init__(self) -> None:
        self._modules: dict[str, str] = {}  # names in the source -> modules
        self._solution_names: set[str] = set()  # names imported from the solution
        self._fixtures: set[str] = set()
        self._classes: dict[str, ast.ClassDef] = {}
        self._has_indirect_marks = False

    def find(self, tree: ast.Module) -> Iterator[str]:
        """Yield the name of each unsupported feature; a name may repeat."""
        guarded = _find_guarded_imports(tree)
        self._has_indirect_marks = python_tests.has_indirect_marks(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in guarded:
                yield from self._check_import(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
                yield from self._check_class(node)
            elif isinstance(node, python_tests.FunctionNode):
                makes = python_tests.find_fixture_names(
                    node, lambda made: self._resolve_path(made) == "pytest.fixture"
                )
                self._fixtures.update(makes)
        tests = list(
            python_tests.find_tests(tree, lambda node: self._resolve_path(node).rpartition(".")[2])
        )
        for test in tests:
            yield from self._check_test(test)
        if not tests:
            yield "no test found"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield from self._check_attribute(node)
            elif isinstance(node, ast.Call):
                yield from self._check_call(node)

    # -- names

    def _check_import(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                self._modules[alias.asname or first] = alias.name if alias.asname else first
                yield from _check_module(alias.name)
            return
        name = "." * node.level + (node.module or "")
        yield from _check_module(name)
        for alias in node.names:
            if name == "solution":
                self._solution_names.add(alias.asname or alias.name)
            else:
                self._modules[alias.asname or alias.name] = f"{name}.{alias.name}"
            if name == "pytest" and alias.name not in SUPPORTED_PYTEST_NAMES:
                yield f"pytest.{alias.name}"
            if alias.name in UNSUPPORTED_CALLS.get(name.rpartition(".")[2], ()):
                yield f"{name}.{alias.name}"

    def _resolve_path(self, node: ast.AST) -> str:
        """Return the path `a.b.c` of an expression, with its module's name as its first part; or
        "".
        """
        if isinstance(node, ast.Name):
            return self._modules.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self._resolve_path(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def _check_attribute(self, node: ast.Attribute) -> Iterator[str]:
        before, _, name = self._resolve_path(node).rpartition(".")
        if node.attr in LOG_LISTENERS:
            yield f"{node.attr} (the solution's logs)"
        if before == "pytest" and name not in SUPPORTED_PYTEST_NAMES:
            yield f"pytest.{name}"
        elif before == "pytest.mark" and name in UNSUPPORTED_MARKS:
            yield f"pytest.mark.{name}"
        elif name in UNSUPPORTED_CALLS.get(before.rpartition(".")[2], ()) and before:
            yield f"{before}.{name}"
        elif node.attr in _LOOP_METHODS and isinstance(node.value, ast.Call):
            loop = self._resolve_path(node.value.func)
            if loop.startswith("asyncio."):
                yield f"{loop}().{node.attr}"

    def _check_call(self, node: ast.Call) -> Iterator[str]:
        path = self._resolve_path(node.func)
        if path == "pytest.importorskip" and node.args:
            module = node.args[0]
            if isinstance(module, ast.Constant) and isinstance(module.value, str):
                for _ in _check_module(module.value):
                    yield f"pytest.importorskip({module.value!r})"
        if path.split(".")[-1] in ("patch", "object") and "patch" in path:
            for keyword in node.keywords:
                if keyword.arg in ("autospec", "spec", "spec_set"):
                    yield f"mock.patch(..., {keyword.arg}=)"

    # -- tests

    def _check_test(self, test: python_tests.PythonTest) -> Iterator[str]:
        node, marks = test.node, test.decorators
        given = {ANY_ARGUMENT} if self._has_indirect_marks else set()
        for mark in marks:
            if (
                isinstance(mark, ast.Call)
                and self._resolve_path(mark.func) == "pytest.mark.parametrize"
            ):
                given |= python_tests.get_parametrized_arguments(mark)
        if not test.is_unittest:
            static = any(self._resolve_path(d) == "staticmethod" for d in node.decorator_list)
            filled = (test.owner is not None and not static) + self._count_patched_arguments(
                node.decorator_list
            )
            for name in test.list_required_arguments(filled):
                if (
                    name not in given | self._fixtures | SUPPORTED_FIXTURES
                    and ANY_ARGUMENT not in given
                ):
                    yield f"fixture {name}" if name != "mocker" else "pytest-mock's mocker"
        if isinstance(node, ast.AsyncFunctionDef) and not test.is_unittest:
            paths = {self._resolve_path(python_tests.get_callee(mark)) for mark in marks}
            if "pytest.mark.asyncio" not in paths and "pytestmark" not in self._modules:
                yield f"async def {node.name} without pytest.mark.asyncio"

    def _count_patched_arguments(self, decorators: list[ast.expr]) -> int:
        """Return how many arguments the decorators of `unittest.mock` fill."""
        count = 0
        for call in [decorator for decorator in decorators if isinstance(decorator, ast.Call)]:
            path = self._resolve_path(call.func).split(".")
            given = len(call.args) > (2 if path[-1] == "object" else 1)
            if "patch" in path and path[-1] != "dict" and not given:
                count += not any(keyword.arg == "new" for keyword in call.keywords)
        return count

    # -- classes

    def _check_class(self, node: ast.ClassDef) -> Iterator[str]:
        """Check a class for bases in both jails and for handlers of the solution's loggers."""
        paths = list(map(self._resolve_path, node.bases))
        for path in paths:
            if path.startswith("logging.") and path.endswith("Handler"):
                yield f"class {node.name}({path}) (the solution's logs)"
        ours = self._solution_names
        solutions = [p for p in paths if p.startswith("solution.") or p.split(".")[0] in ours]
        others = [p for p in paths if p in self._classes]
        if solutions and (others or node.keywords):
            but = others[0] if others else f"{node.keywords[0].arg}="
            yield (
                f"class {node.name}({solutions[0]}, {but}) with bases of the solution and "
                "of the tests"
            )


def _find_guarded_imports(tree: ast.Module) -> set[ast.AST]:
    """Return imports that may fail: those in a `try` that handles it."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                named = ast.dump(handler.type) if handler.type else "ImportError"
                if "ImportError" in named or "ModuleNotFoundError" in named or "Exc" in named:
                    found.update(part for child in node.body for part in ast.walk(child))
    return found


def _check_module(name: str) -> Iterator[str]:
    first = name.split(".")[0]
    if name in ("pytest", "solution"):
        return
    if name.startswith("."):
        yield f"import {name} (a relative import)"
    elif first in UNSUPPORTED_MODULES:
        yield f"import {name} ({UNSUPPORTED_MODULES[first]})"
    elif first in ("pytest", "solution") or first not in sys.stdlib_module_names:
        yield f"import {name} (not in the jail)"
