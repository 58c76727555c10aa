"""Tests of a row under the real pytest, in one interpreter with the solution.

The solution can change everything that runs here, so no message is proof. docs/use/rewards.md lists
what a program can forge. Cheap checks are made: a test passes only if pytest has run it to its
end, in the process of the request, without a change that `VerdictGuard` detects. The token that an
outcome must carry stays unread in the pipe until then.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any, NoReturn

from ..wire import frames

SOLUTION_FILE, TESTS_FILE, CONFIG_FILE = "solution.py", "test_solution.py", "pytest.ini"
ASYNC_PLUGINS = (
    "asyncio",
    "anyio",
    "trio",
    "twisted",
    "tornado",
)  # plugins that run async functions
CO_COROUTINE = 0x80  # flags of `inspect`, which need not be imported for every jail
MAX_ERROR_CHARACTERS = 300
OPTIONS = (
    "-qq --no-header --no-summary --tb=no --assert=plain --noconftest -p no:cacheprovider "
    "-p no:faulthandler"
)
PACKAGES = ("_pytest", "pytest", "pluggy", "unittest", "jail")
MODULES = ("builtins", "math", "operator")
UNGUARDED_NAMES = {"input", "print", "open", "_"}  # replaced by tests themselves for good
GUARDED_TYPES = (types.FunctionType, types.BuiltinFunctionType, type, classmethod, staticmethod)

_is_host_pytest = False  # this pytest is not the interpreter's own


def preload(fallback_directory: str) -> None:
    """Import the modules of every session, in the zygote."""
    global _is_host_pytest
    try:
        import pytest
        from _pytest import config

        for name in config.default_plugins:
            __import__(f"_pytest.{name}")
    except Exception as error:
        print(f"zygote: pytest cannot be imported: {error}", file=sys.stderr)
        return
    _is_host_pytest = bool(fallback_directory) and str(pytest.__file__).startswith(
        fallback_directory + os.sep
    )


def run(program: dict[str, Any], channel: int) -> None:
    """Run one session of pytest.

    It sends its collection, receives the tests to run, and sends each test's outcome. Without a
    solution it only collects, with a placeholder for the solution.
    """
    try:
        import pytest
    except Exception as error:  # our packages may be too new for the interpreter
        frames.send(channel, {"absent": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]})
        return
    placeholder = None
    if "source" in program:
        _write(SOLUTION_FILE, program["source"])
    else:
        placeholder = Placeholder("solution")
        sys.modules["solution"] = placeholder
    _write(CONFIG_FILE, "[pytest]\n")
    _write(TESTS_FILE, "")  # empty: a program would look here first
    sys.meta_path.insert(0, _TestsImporter(program.pop("tests")))
    if _is_host_pytest:  # packages installed for the interpreter may not fit it
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.argv = ["pytest", TESTS_FILE]
    session = _PytestSession(channel, placeholder)
    pytest.main(
        [*OPTIONS.split(), "-c", CONFIG_FILE, "--rootdir", ".", TESTS_FILE], plugins=[session]
    )


def _write(name: str, text: str) -> None:
    with open(name, "w", encoding="utf-8", newline="") as file:
        file.write(text)


class _TestsImporter:
    """Importer of the test module, whose source is in no file; it is used once."""

    def __init__(self, source: str) -> None:
        self._source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != os.path.splitext(TESTS_FILE)[0]:
            return None
        path_of_tests = os.path.abspath(TESTS_FILE)
        return importlib.util.spec_from_file_location(name, path_of_tests, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """Return None, for the default kind of module."""

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        code = compile(self._source, module.__file__ or TESTS_FILE, "exec", dont_inherit=True)
        self._source = ""
        exec(code, module.__dict__)


class _PytestSession:
    """Plugin that sends pytest's collection to the sandbox, and runs the requested tests."""

    def __init__(self, channel: int, placeholder: Placeholder | None) -> None:
        self._channel, self._placeholder = channel, placeholder
        self._pid = os.getpid()
        self._guard = VerdictGuard()
        self._collection_error: BaseException | None = None
        self._reports: list[Any] = []

    def pytest_collection(self, session: Any) -> None:
        """Collect before the solution is imported."""
        self._guard.take_snapshot(session.config.pluginmanager)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        self._collection_error = self._collection_error or call.excinfo.value

    def pytest_collection_finish(self, session: Any) -> None:
        if session.testsfailed or self._collection_error is not None:
            error = cause = self._collection_error
            while cause is not None and not isinstance(cause, ModuleNotFoundError):
                cause = cause.__cause__ or cause.__context__
            failure = {
                "broken": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS],
                "used": self._is_placeholder_used(),
            }
            frames.send(self._channel, {**failure, "module": getattr(cause, "name", None) or ""})
            return
        entries = [{"id": item.nodeid.partition("::")[2]} for item in session.items]
        for entry, item in zip(entries, session.items):
            if lacking := _find_missing_plugin(item):
                entry["lacks"] = lacking
        frames.send(self._channel, {"collected": entries, "used": self._is_placeholder_used()})

    def _is_placeholder_used(self) -> bool:
        return self._placeholder is not None and self._placeholder.__dict__["uses"].count > 0

    def pytest_runtestloop(self, session: Any) -> bool:
        """Replace pytest's own loop, which would run tests without a request."""
        if session.testsfailed or self._placeholder is not None:
            return True
        plan = [session.items[i] for i in frames.receive(self._channel)["plan"]]
        codes = [get_code(item) for item in plan]
        for number, item in enumerate(plan):
            test = frames.receive(self._channel)["test"]
            has_same_code = get_code(item) is codes[number]
            self._reports = []
            following = plan[number + 1] if number + 1 < len(plan) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if os.getpid() != self._pid:  # a process that the test has forked returned here
                os._exit(1)
            outcome = _classify_reports(self._reports)
            if not (has_same_code and self._guard.is_unchanged()):
                outcome = "changed"
            token = frames.receive(self._channel)["token"]
            frames.send(self._channel, {"test": test, "token": token, "outcome": outcome})
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)


def _classify_reports(reports: list[Any]) -> str:
    """Return passed | failed | skipped | xfailed | xpassed, as pytest counts an item."""
    if any(report.outcome == "failed" for report in reports):
        return "failed"
    called = [report for report in reports if report.when == "call"]
    for report in reports:
        if report.outcome == "skipped":
            return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if {report.when for report in reports} != {"setup", "call", "teardown"}:
        return "failed"
    return "xpassed" if any(hasattr(report, "wasxfail") for report in called) else "passed"


def _find_missing_plugin(item: Any) -> str:
    """Return a fixture of the test that only a missing plugin would have, or an empty string."""
    function, info = getattr(item, "function", None), getattr(item, "_fixtureinfo", None)
    if not isinstance(function, types.FunctionType) or info is None:
        return ""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for name in info.argnames:
        if name not in info.name2fixturedefs and name not in parameters and name != "request":
            return f"the fixture {name}"
    is_async = function.__code__.co_flags & CO_COROUTINE and type(item).__name__ == "Function"
    if is_async and not any(item.config.pluginmanager.has_plugin(name) for name in ASYNC_PLUGINS):
        return "a plugin for async functions"
    return ""


class VerdictGuard:
    """Detector of changes to pytest, unittest and built-in functions by a program.

    It is in the program's own interpreter, where a program that searches for it can defeat it. It
    makes the usual ways of patching a verdict useless.
    """

    def __init__(self) -> None:
        self._snapshot: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._plugins: Any = None
        self._plugin_names: set[str] = set()

    def take_snapshot(self, plugins: Any) -> None:
        """Record the current state. `plugins` is pytest's plugin manager."""
        self._plugins, self._plugin_names = plugins, _list_plugin_names(plugins)
        classes: set[int] = set()
        for name, module in list(sys.modules.items()):
            if name in MODULES or name.partition(".")[0] in PACKAGES:
                self._snapshot_names(vars(module), classes, name.partition(".")[0])

    def _snapshot_names(self, names: Any, classes: set[int], package: str) -> None:
        for name, value in list(names.items()):
            if not isinstance(value, (*GUARDED_TYPES, property)) or name in UNGUARDED_NAMES:
                continue
            self._snapshot.append((names, name, value, getattr(value, "__code__", None)))
            if isinstance(value, type) and id(value) not in classes:
                classes.add(id(value))
                if value.__module__.partition(".")[0] == package and package != "builtins":
                    self._snapshot_names(vars(value), classes, package)

    def is_unchanged(self) -> bool:
        """Return whether all is unchanged, with the same plugins, and nothing is traced."""
        for names, name, value, code in self._snapshot:
            if names.get(name) is not value or getattr(value, "__code__", None) is not code:
                return False
        traced = sys.gettrace() is not None or sys.getprofile() is not None
        return not traced and _list_plugin_names(self._plugins) == self._plugin_names


def _list_plugin_names(plugins: Any) -> set[str]:
    """Return the names of the plugins, without those of collected modules."""
    return {name for name, plugin in plugins.list_name_plugin() if plugin is not None}


def get_code(item: Any) -> Any:
    """Return the code of a collected test; None for a test that is not a function."""
    return getattr(getattr(item, "function", None), "__code__", None)


class UseCounter:
    """Counter of uses of a placeholder beyond its name."""

    count = 0


class PlaceholderUsed(Exception):
    """Error raised when the tests need the solution's values to be collected."""


def _make_failing_operator(name: str) -> Any:
    def operation(self: Any, *_: Any) -> NoReturn:
        use_counter.count += 1
        raise PlaceholderUsed(f"{name} of an object of the solution")

    return operation


use_counter = UseCounter()
ABSENT_ATTRIBUTES = (
    "pytestmark",
    "_pytestfixturefunction",
)  # names that pytest looks up in all that it collects
_FAILING_OPERATORS = (
    "__iter__ __next__ __len__ __getitem__ __contains__ __bool__ __int__ __float__ __index__ "
    "__lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __enter__"
)


class _PlaceholderMeta(type):
    """Metaclass of placeholder classes, as tests may inherit from what they import."""

    @property
    def __test__(cls) -> bool:
        # a placeholder is not a test, but a test may inherit from it
        return "_is_placeholder" not in vars(cls)

    def __getattr__(cls, name: str) -> Any:
        return _get_attribute(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_placeholder" not in vars(cls):
            return super().__call__(*args, **kwargs)
        use_counter.count += 1
        return object.__new__(_PlaceholderValue)


class _PlaceholderValue(metaclass=_PlaceholderMeta):
    """Placeholder of any one object."""

    _is_placeholder = True

    def __getattr__(self, name: str) -> Any:
        return _get_attribute(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        use_counter.count += 1
        return object.__new__(_PlaceholderValue)


def _get_attribute(name: str) -> Any:
    if name.startswith("__") or name in ABSENT_ATTRIBUTES:
        raise AttributeError(name)
    return _make_placeholder(name)


for _name in _FAILING_OPERATORS.split():
    setattr(_PlaceholderValue, _name, _make_failing_operator(_name))
    setattr(_PlaceholderMeta, _name, _make_failing_operator(_name))


def _make_placeholder(name: str) -> Any:
    return _PlaceholderMeta(name, (_PlaceholderValue,), {"_is_placeholder": True})


class Placeholder(types.ModuleType):
    """Placeholder module for a solution while its tests are collected.

    So the tests are known before any program can influence them. Everything can be imported from it
    except all at once (`*`), and each further use is counted.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["uses"] = use_counter

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            use_counter.count += 1
            raise PlaceholderUsed("all names of the solution")
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_placeholder(name)
