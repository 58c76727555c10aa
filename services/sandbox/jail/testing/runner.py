"""Runner of tests against a solution in another jail; its own jail has no code of the model.

Tests are a Python module as pytest would run it, that imports from `solution`. `collection` finds
its tests, and `pytest_shim` is their `pytest`.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Callable

from ..objects.object_connection import ROOT, NotTransferable, ObjectConnection, open_file_sync
from ..wire import frames
from . import namespace, patches
from .collection import Item, collect_items
from .fixtures import FixtureRegistry, FixtureResolver, FixtureStore
from .marks import TestMark
from .pytest_shim import FailedByTest, Skipped, make_pytest_module

FILE_WORDS = (
    "tmp_path",
    "tempfile",
    "open(",
    "Path(",
    "chdir",
    "makedirs",
)  # words in tests that use files
SWALLOWED_ASSERTION = "an assertion failed in a callback of the tests, and the solution caught it"
MAX_ERROR_CHARACTERS = 300  # of a failed test
GENERATOR, COROUTINE, ASYNC_GENERATOR = 0x20, 0x80, 0x200  # flags of code, see `inspect`


def run(program: dict[str, Any], channel: int, peer: int) -> None:
    """Report each test as it begins and ends; only these frames carry the call's nonce."""
    nonce = program["nonce"]

    def report(**fields: Any) -> None:
        frames.send(channel, {"nonce": nonce, **fields})

    connection = ObjectConnection(peer, is_trusted=True)
    unreported_wait_s = float(program.get("unreported_wait_s", 0.0))
    connection.on_long_wait = lambda is_waiting: report(is_waiting=is_waiting)
    connection.unreported_wait_s = unreported_wait_s  # while the solution is imported, too
    try:
        ready = connection.receive().get("ready") is True
    except (frames.FrameChannelClosed, AttributeError):
        ready = False
    connection.unreported_wait_s = unreported_wait_s
    tests = TestModule(connection)

    def report_rejection() -> None:
        report(unsupported=connection.rejection, by_solution=connection.is_rejection_by_solution)

    def answer() -> None:
        while True:
            number = frames.receive(channel)["test"]
            connection.unreported_wait_s = unreported_wait_s
            verdict = tests.run_test(number)
            if connection.rejection:
                report_rejection()
                return
            if connection.is_closed:
                error = "the solution's process has exited"
                verdict = {"passed": False, "lost": True, "error": error}
            report(test=number, **verdict)

    try:
        items = (
            tests.collect(program["source"], program.get("shares_files") is True) if ready else []
        )
    except BaseException as error:
        if connection.rejection:
            report_rejection()
        elif connection.is_closed or connection.has_failed or connection.has_used_solution:
            # A solution must not make its tests invalid.
            report(ready=False, tests=[], error=_format_error(error))
        elif isinstance(error, Skipped):
            report(ready=True, tests=["skipped"])
            tests.is_skipped = True
            answer()
        else:
            report(broken=_format_error(error))
        return
    # Tests may have called the solution for their parameters.
    ready = ready and bool(items or not connection.has_used_solution)
    report(ready=ready, tests=[item.name for item in items])
    if ready:
        answer()


class TestModule:
    """Tests of one module."""

    def __init__(self, connection: ObjectConnection) -> None:
        self._connection, self._store = connection, FixtureStore()
        self._items: list[Item] = []
        self._registry: FixtureRegistry | None = None
        self._current_class: type[Any] | None = None
        self._is_module_set_up = False
        self.is_skipped = False  # the whole module is skipped

    def collect(self, source: str, shares_files: bool) -> list[Item]:
        """Collect the tests. With `shares_files`, both sides' scratch directories have one path."""
        connection = self._connection
        connection.assertion_types = (AssertionError, FailedByTest)
        sys.modules["solution"] = namespace.SolutionModule(connection)
        sys.modules["pytest"] = make_pytest_module(connection)
        if shares_files and any(word in source for word in FILE_WORDS):
            connection.file_sync = open_file_sync()
        connection.wants_warnings = "warn" in source or "deprecated" in source
        if "mock" in source:
            patches.forward_mock_patches(connection)
        patches.forward_introspection(connection, source)
        if "unittest" in source:
            from unittest import case

            case.isinstance = namespace.is_instance  # type: ignore[attr-defined]
        module = namespace.execute_tests(source)
        builtin: dict[str, Callable[[FixtureStore], Any]] = {
            "capsys": lambda store: _with_finalizer(store, patches.CapturedOutput(), "stop"),
            "capfd": lambda store: _with_finalizer(store, patches.CapturedOutput(), "stop"),
            "monkeypatch": lambda store: _with_finalizer(
                store, patches.MonkeyPatch.for_connection(connection)(), "undo"
            ),
            "tmp_path": lambda _: self._create_temp_path_factory().mktemp("test"),
            "tmp_path_factory": lambda _: self._create_temp_path_factory(),
        }
        self._registry = FixtureRegistry(module, builtin)
        self._module = module
        self._items = list(collect_items(module, self._registry))
        return self._items

    def _create_temp_path_factory(self) -> patches.TempPathFactory:
        if self._connection.file_sync is None:
            self._connection.reject("tmp_path, as the jails of this host have no /tmp of their own")
        return patches.TempPathFactory(ROOT)

    def run_test(self, number: int) -> dict[str, Any]:
        """Run a test and return its outcome, with the error of a failed one.

        A test that is skipped, or expected to fail, does not count for the solution, however it
        ends.
        """
        if self.is_skipped:
            return {"passed": False, "error": "skipped"}
        item = self._items[number]
        try:
            for mark in item.marks:
                conditional = mark.name in ("skipif", "xfail")
                if mark.name == "skip" or (conditional and _is_condition_true(mark, item)):
                    return {"passed": False, "error": mark.name}
            self._connection.callback_failures.clear()
            self._run_with_setup(item)
            # A wrong solution can catch the failed assertion of a callback.
            if self._connection.callback_failures:
                self._connection.reject(SWALLOWED_ASSERTION, by_solution=True)
        except BaseException as error:
            return {"passed": False, "error": _format_error(error)}
        return {"passed": True, "error": ""}

    def _run_with_setup(self, item: Item) -> None:
        if item.owner is not self._current_class:
            self._store.tear_down("class")
            self._current_class = item.owner
            if item.owner is not None:
                self._set_up_class(item.owner, item.is_unittest)
        if not self._is_module_set_up:
            self._is_module_set_up = True
            _call(getattr(self._module, "setup_module", None), self._module)
            _call(getattr(self._module, "setUpModule", None))
        try:
            if item.is_unittest:
                self._run_unittest(item)
            else:
                self._run_function(item)
        except BaseException:
            try:
                self._store.tear_down("function")
            except (frames.FrameChannelClosed, NotTransferable):
                raise
            except BaseException:  # the test has failed already
                pass
            raise
        self._store.tear_down("function")

    def _set_up_class(self, owner: Any, is_unittest: bool) -> None:
        if is_unittest:
            owner.setUpClass()
            self._store.add_finalizer("class", owner.doClassCleanups)
            self._store.add_finalizer("class", owner.tearDownClass)
            return
        _call(getattr(owner, "setup_class", None), owner)
        teardown = getattr(owner, "teardown_class", None)
        if teardown is not None:
            self._store.add_finalizer("class", lambda: _call(teardown, owner))

    def _run_unittest(self, item: Item) -> None:
        import unittest

        assert item.owner is not None and self._registry is not None
        instance = item.owner(item.originalname)
        resolver = FixtureResolver(item, self._registry, self._store, instance)
        for name in self._registry.list_autouse(item.owner):
            resolver.get_value(name)
        for mark in item.marks:
            for name in mark.args if mark.name == "usefixtures" else ():
                resolver.get_value(name)
        result = unittest.TestResult()
        instance.run(result)
        if result.skipped:
            raise Skipped("skipped")
        for _, text in (*result.errors, *result.failures):
            raise AssertionError(text.strip().splitlines()[-1])
        if not result.wasSuccessful():
            raise AssertionError("unexpected success")

    def _run_function(self, item: Item) -> None:
        assert self._registry is not None
        instance = item.owner() if item.owner is not None else None
        code = getattr(item.function, "__func__", item.function)
        flags = code.__code__.co_flags
        if flags & (GENERATOR | ASYNC_GENERATOR):
            raise AssertionError("a test that yields is not run")
        if instance is None:
            self._set_up("setup_function", "teardown_function", self._module, code)
        resolver = FixtureResolver(item, self._registry, self._store, instance)
        for name in self._registry.list_autouse(item.owner):
            resolver.get_value(name)
        if instance is not None:
            method = getattr(instance, item.originalname, code)
            self._set_up("setup_method", "teardown_method", instance, method)
        values = {n: resolver.get_value(n) for n in item.fixture_names if n not in item.values}
        arguments = {
            n: item.values[n] if n in item.values else values[n] for n in item.argument_names
        }
        function = item.function.__get__(instance, item.owner) if instance is not None else code
        if flags & COROUTINE:
            if not any(mark.name == "asyncio" for mark in item.marks):
                raise AssertionError("async def without pytest.mark.asyncio is not run")
            import asyncio

            asyncio.run(function(**arguments))
        else:
            function(**arguments)  # pytest only warns about a returned value

    def _set_up(self, setup: str, teardown: str, owner: Any, argument: Any) -> None:
        _call(getattr(owner, setup, None), argument)
        teardown_function = getattr(owner, teardown, None)
        if teardown_function is not None:
            self._store.add_finalizer("function", lambda: _call(teardown_function, argument))


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


def _with_finalizer(store: FixtureStore, value: Any, finalizer: str) -> Any:
    """Return a fixture's value; its method `finalizer` is called at the end of the test."""
    store.add_finalizer("function", getattr(value, finalizer))
    return value


def _call(function: Any, *arguments: Any) -> None:
    """Call a setup or teardown, with its argument if it takes one."""
    if function is None:
        return
    code = getattr(function, "__func__", function).__code__
    accepted = code.co_argcount - (1 if isinstance(function, types.MethodType) else 0)
    function(*arguments[:accepted])


def _is_condition_true(mark: TestMark, item: Item) -> bool:
    """Return whether one of the mark's conditions holds; true without any."""
    conditions = [*mark.args, *(mark.kwargs[key] for key in mark.kwargs if key == "condition")]
    scope = {"sys": sys, "os": __import__("os"), **vars(item.module)}
    return not conditions or any(eval(c, scope) if isinstance(c, str) else c for c in conditions)
