"""Says of a row's tests what a runner cannot do, before anything is scored by them: reads the
syntax tree of tests in Python for what the runner `isolated` cannot run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from meshrl.common.grading import suites
from meshrl.common.grading.suites import ANY

_PYTEST = (
    "raises approx fixture mark param fail skip xfail importorskip warns deprecated_call "
    "MonkeyPatch FixtureRequest CaptureFixture ExceptionInfo exit main"
)
PYTEST = frozenset(_PYTEST.split())
FIXTURES = frozenset({"capsys", "capfd", "monkeypatch", "request", "tmp_path", "tmp_path_factory"})
MARKS_REFUSED = {"anyio": "pytest-anyio", "trio": "pytest-trio"}

# Of the standard library: what has no sense where the solution runs in another process.
MODULES = {
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
# Coroutines of the two jails run one after another, each to its end: what is at the same time, or
# gives way to what else runs, has no sense there.
_AT_A_TIME = (
    "gather create_task ensure_future TaskGroup Task as_completed wait wait_for shield timeout "
    "timeout_at to_thread run_coroutine_threadsafe sleep Future Queue LifoQueue PriorityQueue "
    "Event Lock Semaphore BoundedSemaphore Condition Barrier"
)
_OF_LOOPS = frozenset({"create_task", "create_future", "call_soon", "call_later"})
_INSPECT = "getsourcelines getsourcefile getfile getmodule getcallargs stack currentframe"
CALLS = {
    "inspect": frozenset(_INSPECT.split()),
    "importlib": {"reload"},
    "asyncio": frozenset(_AT_A_TIME.split()),
    "os": {"chdir", "fork", "system", "popen"},
    "sqlite3": {"connect"},  # the solution can use no connection of the tests
    "sys": {"getrefcount", "settrace", "setprofile", "_getframe", "setrecursionlimit"},
    "mock": {"create_autospec", "seal"},
}


LISTENERS = frozenset({"assertLogs", "assertNoLogs", "addHandler"})


class Unsupported(Exception):
    """No runner of the job can run a row's tests; the text names what of them it cannot do.

    `provoked`: it has come to this by what an object of the solution does, so another solution, or
    the same one with a mind to, decides about it; by what the tests do otherwise.
    """

    def __init__(self, what: str, provoked: bool = False) -> None:
        super().__init__(what)
        self.provoked = provoked


def unsupported(tests: str) -> tuple[str, ...]:
    """Names each thing in these tests in Python that the runner `isolated` cannot do, as "fixture
    caplog" or "import numpy (not in the jail)", in the order of the source; empty if it can run all
    of them. It reads and runs nothing. What shows only when tests run is told then (`Unsupported`).
    """
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        return (f"syntax error, line {error.lineno}",)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, nested too deep
        return (f"no Python: {type(error).__name__}",)
    return tuple(dict.fromkeys(TestReader().read(tree)))


class TestReader:
    """Reads one module of tests."""

    def __init__(self) -> None:
        self._modules: dict[str, str] = {}  # names in the source, and the modules that they mean
        self._ours: set[str] = set()  # names imported from the solution
        self._fixtures: set[str] = set()
        self._classes: dict[str, ast.ClassDef] = {}
        self._marked_elsewhere = False

    def read(self, tree: ast.Module) -> Iterator[str]:
        """The name of each thing that cannot be run; one may come twice."""
        guarded = _guarded(tree)
        self._marked_elsewhere = suites.marks_elsewhere(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in guarded:
                yield from self._imported(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
                yield from self._class(node)
            elif isinstance(node, suites.Function):
                makes = suites.fixtures(node, lambda made: self._path(made) == "pytest.fixture")
                self._fixtures.update(makes)
        tests = list(suites.find(tree, lambda node: self._path(node).rpartition(".")[2]))
        for test in tests:
            yield from self._test(test)
        if not tests:
            yield "no test found"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield from self._attribute(node)
            elif isinstance(node, ast.Call):
                yield from self._call(node)

    # -- names

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                self._modules[alias.asname or first] = alias.name if alias.asname else first
                yield from _module(alias.name)
            return
        name = "." * node.level + (node.module or "")
        yield from _module(name)
        for alias in node.names:
            if name == "solution":
                self._ours.add(alias.asname or alias.name)
            else:
                self._modules[alias.asname or alias.name] = f"{name}.{alias.name}"
            if name == "pytest" and alias.name not in PYTEST:
                yield f"pytest.{alias.name}"
            if alias.name in CALLS.get(name.rpartition(".")[2], ()):
                yield f"{name}.{alias.name}"

    def _path(self, node: ast.AST) -> str:
        """`a.b.c` of an expression, its first name being that of the module it means; or ""."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self._path(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        before, _, name = self._path(node).rpartition(".")
        if node.attr in LISTENERS:
            yield f"{node.attr} (what the solution logs)"
        if before == "pytest" and name not in PYTEST:
            yield f"pytest.{name}"
        elif before == "pytest.mark" and name in MARKS_REFUSED:
            yield f"pytest.mark.{name}"
        elif name in CALLS.get(before.rpartition(".")[2], ()) and before:
            yield f"{before}.{name}"
        elif node.attr in _OF_LOOPS and isinstance(node.value, ast.Call):
            loop = self._path(node.value.func)
            if loop.startswith("asyncio."):
                yield f"{loop}().{node.attr}"

    def _call(self, node: ast.Call) -> Iterator[str]:
        path = self._path(node.func)
        if path == "pytest.importorskip" and node.args:
            wanted = node.args[0]
            if isinstance(wanted, ast.Constant) and isinstance(wanted.value, str):
                for _ in _module(wanted.value):
                    yield f"pytest.importorskip({wanted.value!r})"
        if path.split(".")[-1] in ("patch", "object") and "patch" in path:
            for keyword in node.keywords:
                if keyword.arg in ("autospec", "spec", "spec_set"):
                    yield f"mock.patch(..., {keyword.arg}=)"

    # -- tests

    def _test(self, test: suites.WrittenTest) -> Iterator[str]:
        node, marks = test.node, test.marks
        given = {ANY} if self._marked_elsewhere else set()
        for mark in marks:
            if isinstance(mark, ast.Call) and self._path(mark.func) == "pytest.mark.parametrize":
                given |= suites.parametrized(mark)
        if not test.case:
            static = any(self._path(d) == "staticmethod" for d in node.decorator_list)
            filled = (test.owner is not None and not static) + self._patched(node.decorator_list)
            for name in test.arguments(filled):
                if name not in given | self._fixtures | FIXTURES and ANY not in given:
                    yield f"fixture {name}" if name != "mocker" else "pytest-mock's mocker"
        if isinstance(node, ast.AsyncFunctionDef) and not test.case:
            paths = {self._path(suites.called(mark)) for mark in marks}
            if "pytest.mark.asyncio" not in paths and "pytestmark" not in self._modules:
                yield f"async def {node.name} without pytest.mark.asyncio"

    def _patched(self, decorators: list[ast.expr]) -> int:
        """How many arguments the decorators of `unittest.mock` fill."""
        count = 0
        for call in [decorator for decorator in decorators if isinstance(decorator, ast.Call)]:
            path = self._path(call.func).split(".")
            given = len(call.args) > (2 if path[-1] == "object" else 1)
            if "patch" in path and path[-1] != "dict" and not given:
                count += not any(keyword.arg == "new" for keyword in call.keywords)
        return count

    # -- classes

    def _class(self, node: ast.ClassDef) -> Iterator[str]:
        """A class of two jails at once, or one that listens to the solution's loggers."""
        paths = list(map(self._path, node.bases))
        for path in paths:
            if path.startswith("logging.") and path.endswith("Handler"):
                yield f"class {node.name}({path}) (what the solution logs)"
        ours = self._ours
        solutions = [p for p in paths if p.startswith("solution.") or p.split(".")[0] in ours]
        others = [p for p in paths if p in self._classes]
        if solutions and (others or node.keywords):
            but = others[0] if others else f"{node.keywords[0].arg}="
            yield f"class {node.name}({solutions[0]}, {but}) of the solution's and of the tests'"


def _guarded(tree: ast.Module) -> set[ast.AST]:
    """Imports that may fail: those in a `try` that handles it."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                named = ast.dump(handler.type) if handler.type else "ImportError"
                if "ImportError" in named or "ModuleNotFoundError" in named or "Exc" in named:
                    found.update(part for child in node.body for part in ast.walk(child))
    return found


def _module(name: str) -> Iterator[str]:
    first = name.split(".")[0]
    if name in ("pytest", "solution"):
        return
    if name.startswith("."):
        yield f"import {name} (a relative import)"
    elif first in MODULES:
        yield f"import {name} ({MODULES[first]})"
    elif first in ("pytest", "solution") or first not in sys.stdlib_module_names:
        yield f"import {name} (not in the jail)"
