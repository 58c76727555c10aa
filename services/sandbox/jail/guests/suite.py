"""Runs a row's tests under the real pytest, in one interpreter with the solution that they test.

Whatever runs here can be changed by the solution, so nothing that is said here is proof: see
docs/sandbox.md for what a program can forge. What is cheap to notice is noticed: a test is passed
only if pytest has run it to its end, in the process that was asked, with nothing changed that
`VerdictGuard` has seen. The token that an outcome must carry lies unread in the pipe meanwhile.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any, NoReturn

from ..wire import frames

SOLUTION, TESTS, SETTINGS = "solution.py", "test_solution.py", "pytest.ini"
ASYNC = ("asyncio", "anyio", "trio", "twisted", "tornado")  # plugins that run async functions
CO_COROUTINE = 0x80  # of `inspect`, which need not be imported for every jail
TEXT = 300  # characters of what went wrong
OPTIONS = (
    "-qq --no-header --no-summary --tb=no --assert=plain --noconftest -p no:cacheprovider "
    "-p no:faulthandler"
)
PACKAGES = ("_pytest", "pytest", "pluggy", "unittest", "jail")
MODULES = ("builtins", "math", "operator")
REPLACED = {"input", "print", "open", "_"}  # what tests themselves replace and leave so
CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type, classmethod, staticmethod)

_lent = False  # this pytest is not the interpreter's own


def warm(searched_last: str) -> None:
    """Imports what every session does, in the zygote."""
    global _lent
    try:
        import pytest
        from _pytest import config

        for name in config.default_plugins:
            __import__(f"_pytest.{name}")
    except Exception as error:
        print(f"zygote: no pytest: {error}", file=sys.stderr)
        return
    _lent = bool(searched_last) and str(pytest.__file__).startswith(searched_last + os.sep)


def run(program: dict[str, Any], channel: int) -> None:
    """One session of pytest: says what it has collected, is told which tests to run, and says of
    each how it ended. Without a solution it only collects, with a placeholder in its place.
    """
    try:
        import pytest
    except Exception as error:  # ours may be too new for the interpreter
        frames.send(channel, {"absent": f"{type(error).__name__}: {error}"[:TEXT]})
        return
    stand_in = None
    if "source" in program:
        _write(SOLUTION, program["source"])
    else:
        stand_in = Placeholder("solution")
        sys.modules["solution"] = stand_in
    _write(SETTINGS, "[pytest]\n")
    _write(TESTS, "")  # what a program would look into first
    sys.meta_path.insert(0, _Tests(program.pop("tests")))
    if _lent:  # what is installed for the interpreter need not fit to it
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.argv = ["pytest", TESTS]
    session = _PytestSession(channel, stand_in)
    pytest.main([*OPTIONS.split(), "-c", SETTINGS, "--rootdir", ".", TESTS], plugins=[session])


def _write(name: str, text: str) -> None:
    with open(name, "w", encoding="utf-8", newline="") as file:
        file.write(text)


class _Tests:
    """Imports the module of tests, whose source is in no file, and forgets it."""

    def __init__(self, source: str) -> None:
        self._source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != os.path.splitext(TESTS)[0]:
            return None
        place = os.path.abspath(TESTS)
        return importlib.util.spec_from_file_location(name, place, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """The usual kind of module."""

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        code = compile(self._source, module.__file__ or TESTS, "exec", dont_inherit=True)
        self._source = ""
        exec(code, module.__dict__)


class _PytestSession:
    """A plugin: it tells the sandbox what pytest finds, and runs what the sandbox asks for."""

    def __init__(self, channel: int, stand_in: Placeholder | None) -> None:
        self._channel, self._stand_in = channel, stand_in
        self._own = os.getpid()
        self._guard = VerdictGuard()
        self._broken: BaseException | None = None
        self._reports: list[Any] = []

    def pytest_collection(self, session: Any) -> None:
        """Before the solution is imported."""
        self._guard.look(session.config.pluginmanager)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        self._broken = self._broken or call.excinfo.value

    def pytest_collection_finish(self, session: Any) -> None:
        if session.testsfailed or self._broken is not None:
            error = cause = self._broken
            while cause is not None and not isinstance(cause, ModuleNotFoundError):
                cause = cause.__cause__ or cause.__context__
            said = {"broken": f"{type(error).__name__}: {error}"[:TEXT], "used": self._used()}
            frames.send(self._channel, {**said, "module": getattr(cause, "name", None) or ""})
            return
        found = [{"id": item.nodeid.partition("::")[2]} for item in session.items]
        for entry, item in zip(found, session.items):
            if lacking := _lacking(item):
                entry["lacks"] = lacking
        frames.send(self._channel, {"collected": found, "used": self._used()})

    def _used(self) -> bool:
        return self._stand_in is not None and self._stand_in.__dict__["uses"].count > 0

    def pytest_runtestloop(self, session: Any) -> bool:
        """In place of pytest's own, which would go on without being asked."""
        if session.testsfailed or self._stand_in is not None:
            return True
        plan = [session.items[i] for i in frames.receive(self._channel)["plan"]]
        codes = [code_of(item) for item in plan]
        for number, item in enumerate(plan):
            asked = frames.receive(self._channel)["test"]
            whole = code_of(item) is codes[number]
            self._reports = []
            following = plan[number + 1] if number + 1 < len(plan) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if os.getpid() != self._own:  # a process that the test has forked came back
                os._exit(1)
            outcome = _outcome(self._reports)
            if not (whole and self._guard.unchanged()):
                outcome = "changed"
            token = frames.receive(self._channel)["token"]
            frames.send(self._channel, {"test": asked, "token": token, "outcome": outcome})
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)


def _outcome(reports: list[Any]) -> str:
    """passed | failed | skipped | xfailed | xpassed, as pytest counts an item."""
    if any(report.outcome == "failed" for report in reports):
        return "failed"
    called = [report for report in reports if report.when == "call"]
    for report in reports:
        if report.outcome == "skipped":
            return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if {report.when for report in reports} != {"setup", "call", "teardown"}:
        return "failed"
    return "xpassed" if any(hasattr(report, "wasxfail") for report in called) else "passed"


def _lacking(item: Any) -> str:
    """What the test takes that only a plugin would have; empty: nothing."""
    function, info = getattr(item, "function", None), getattr(item, "_fixtureinfo", None)
    if not isinstance(function, types.FunctionType) or info is None:
        return ""
    given = getattr(getattr(item, "callspec", None), "params", {})
    for name in info.argnames:
        if name not in info.name2fixturedefs and name not in given and name != "request":
            return f"the fixture {name}"
    waits = function.__code__.co_flags & CO_COROUTINE and type(item).__name__ == "Function"
    if waits and not any(item.config.pluginmanager.has_plugin(name) for name in ASYNC):
        return "a plugin for async functions"
    return ""


class VerdictGuard:
    """Notices that a program has changed what judges it: pytest, unittest, built-in functions.

    It is in the program's own interpreter, where nothing is safe from a program that looks for it;
    it keeps the usual ways of patching a verdict from paying.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._plugins: Any = None
        self._names: set[str] = set()

    def look(self, plugins: Any) -> None:
        """Remembers them as they are. `plugins` is pytest's plugin manager."""
        self._plugins, self._names = plugins, _names(plugins)
        classes: set[int] = set()
        for name, module in list(sys.modules.items()):
            if name in MODULES or name.partition(".")[0] in PACKAGES:
                self._look_in(vars(module), classes, name.partition(".")[0])

    def _look_in(self, names: Any, classes: set[int], package: str) -> None:
        for name, value in list(names.items()):
            if not isinstance(value, (*CALLABLE, property)) or name in REPLACED:
                continue
            self._seen.append((names, name, value, getattr(value, "__code__", None)))
            if isinstance(value, type) and id(value) not in classes:
                classes.add(id(value))
                if value.__module__.partition(".")[0] == package and package != "builtins":
                    self._look_in(vars(value), classes, package)

    def unchanged(self) -> bool:
        """Whether all of it is what it was, with the same plugins, and nothing is traced."""
        for names, name, value, code in self._seen:
            if names.get(name) is not value or getattr(value, "__code__", None) is not code:
                return False
        traced = sys.gettrace() is not None or sys.getprofile() is not None
        return not traced and _names(self._plugins) == self._names


def _names(plugins: Any) -> set[str]:
    """The names of plugins that are there; those of collected modules are not among them."""
    return {name for name, plugin in plugins.list_name_plugin() if plugin is not None}


def code_of(item: Any) -> Any:
    """The code of a collected test; None for one that is no function."""
    return getattr(getattr(item, "function", None), "__code__", None)


class Uses:
    """How often more was asked of a placeholder than a name."""

    count = 0


class PlaceholderUsed(Exception):
    """The tests need the solution's values to be collected."""


def _refused(name: str) -> Any:
    def operation(self: Any, *_: Any) -> NoReturn:
        uses.count += 1
        raise PlaceholderUsed(f"{name} of what the solution has")

    return operation


uses = Uses()
NONE = ("pytestmark", "_pytestfixturefunction")  # what pytest looks for in all that it finds
_VALUES = (
    "__iter__ __next__ __len__ __getitem__ __contains__ __bool__ __int__ __float__ __index__ "
    "__lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __enter__"
)


class _StandInClass(type):
    """Of classes, as tests may inherit from what they import."""

    @property
    def __test__(cls) -> bool:
        return "_stands" not in vars(cls)  # it is no test itself, but one may inherit from it

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_stands" not in vars(cls):
            return super().__call__(*args, **kwargs)
        uses.count += 1
        return object.__new__(_Value)


class _Value(metaclass=_StandInClass):
    """What stands for any one object."""

    _stands = True

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        uses.count += 1
        return object.__new__(_Value)


def _attribute(name: str) -> Any:
    if name.startswith("__") or name in NONE:
        raise AttributeError(name)
    return _made(name)


for _name in _VALUES.split():
    setattr(_Value, _name, _refused(_name))
    setattr(_StandInClass, _name, _refused(_name))


def _made(name: str) -> Any:
    return _StandInClass(name, (_Value,), {"_stands": True})


class Placeholder(types.ModuleType):
    """A module that stands for a solution while its tests are collected, so that these are known
    before any program has a say in it: all can be imported from it but everything at once (`*`),
    and whatever more is asked of it is counted.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["uses"] = uses

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            uses.count += 1
            raise PlaceholderUsed("all names of the solution")
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)
