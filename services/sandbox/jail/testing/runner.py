"""Runner of tests against a solution in another jail; its own has no code of the model.

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
SWALLOWED_ASSERTION = "an assertion failed in a callback of the tests and the solution kept it"
TEXT = 300  # characters of a failed test's error
GENERATOR, COROUTINE, ASYNC_GENERATOR = 0x20, 0x80, 0x200  # flags of code, see `inspect`


def run(program: dict[str, Any], channel: int, peer: int) -> None:
    """Report each test as it begins and ends; only these frames carry the call's nonce."""
    nonce = program["nonce"]

    def report(**said: Any) -> None:
        frames.send(channel, {"nonce": nonce, **said})

    side = ObjectConnection(peer, trusted=True)
    patience_s = float(program.get("unreported_wait_s", 0.0))
    side.turn = lambda theirs: report(turn=theirs)
    side.patience_s = patience_s  # of the solution's import, too
    try:
        ready = side.received().get("ready") is True
    except (frames.FrameChannelClosed, AttributeError):
        ready = False
    side.patience_s = patience_s
    tests = TestModule(side)

    def answer() -> None:
        while True:
            asked = frames.receive(channel)["test"]
            side.patience_s = patience_s
            verdict = tests.outcome(asked)
            if side.refused:
                report(unsupported=side.refused, provoked=side.provoked)
                return
            if side.closed:
                error = "the solution's process has ended"
                verdict = {"passed": False, "lost": True, "error": error}
            report(test=asked, **verdict)

    try:
        items = (
            tests.collected(program["source"], program.get("shares_files") is True) if ready else []
        )
    except BaseException as error:
        if side.refused:
            report(unsupported=side.refused, provoked=side.provoked)
        elif side.closed or side.failed or side.used:  # a solution must not break its tests
            report(ready=False, tests=[], error=_format_error(error))
        elif isinstance(error, Skipped):
            report(ready=True, tests=["skipped"])
            tests.skipped = True
            answer()
        else:
            report(broken=_format_error(error))
        return
    ready = ready and bool(items or not side.used)  # the tests may have called it for parameters
    report(ready=ready, tests=[item.name for item in items])
    if ready:
        answer()


class TestModule:
    """Tests of one module."""

    def __init__(self, side: ObjectConnection) -> None:
        self._side, self._store = side, FixtureStore()
        self._items: list[Item] = []
        self._registry: FixtureRegistry | None = None
        self._owner: Any = None
        self._begun = False
        self.skipped = False  # the whole module is skipped

    def collected(self, source: str, files: bool) -> list[Item]:
        """Collect the tests. With `files`, the scratch directories of both sides have one path."""
        side = self._side
        side.assertions = (AssertionError, FailedByTest)
        sys.modules["solution"] = namespace.SolutionModule(side)
        sys.modules["pytest"] = make_pytest_module(side)
        if files and any(word in source for word in FILE_WORDS):
            side.files = open_file_sync()
        side.wants_warnings = "warn" in source or "deprecated" in source
        if "mock" in source:
            patches.forward_mock_patches(side)
        patches.forward_introspection(side, source)
        if "unittest" in source:
            from unittest import case

            case.isinstance = namespace.is_instance  # type: ignore[attr-defined]
        module = namespace.execute_tests(source)
        builtin: dict[str, Callable[[FixtureStore], Any]] = {
            "capsys": lambda store: _with_finalizer(store, patches.CapturedOutput(), "stop"),
            "capfd": lambda store: _with_finalizer(store, patches.CapturedOutput(), "stop"),
            "monkeypatch": lambda store: _with_finalizer(
                store, patches.MonkeyPatch.of(side)(), "undo"
            ),
            "tmp_path": lambda _: self._folders().mktemp("test"),
            "tmp_path_factory": lambda _: self._folders(),
        }
        self._registry = FixtureRegistry(module, builtin)
        self._module = module
        self._items = list(collect_items(module, self._registry))
        return self._items

    def _folders(self) -> patches.TempPathFactory:
        if self._side.files is None:
            self._side.refuse("tmp_path, as the jails of this host have no /tmp of their own")
        return patches.TempPathFactory(ROOT)

    def outcome(self, number: int) -> dict[str, Any]:
        """Run a test and return its outcome, with the error of a failed one.

        A test that is skipped, or expected to fail, does not count for the solution, however it
        ends.
        """
        if self.skipped:
            return {"passed": False, "error": "skipped"}
        item = self._items[number]
        try:
            for mark in item.marks:
                conditional = mark.name in ("skipif", "xfail")
                if mark.name == "skip" or (conditional and _is_condition_true(mark, item)):
                    return {"passed": False, "error": mark.name}
            self._side.asserted.clear()
            self._whole(item)
            if self._side.asserted:  # a wrong solution can catch a callback's assertion
                self._side.refuse(SWALLOWED_ASSERTION, provoked=True)
        except BaseException as error:
            return {"passed": False, "error": _format_error(error)}
        return {"passed": True, "error": ""}

    def _whole(self, item: Item) -> None:
        if item.owner is not self._owner:
            self._store.end("class")
            self._owner = item.owner
            if item.owner is not None:
                self._class_begins(item.owner, item.case)
        if not self._begun:
            self._begun = True
            _call(getattr(self._module, "setup_module", None), self._module)
            _call(getattr(self._module, "setUpModule", None))
        try:
            if item.case:
                self._unit(item)
            else:
                self._function(item)
        except BaseException:
            try:
                self._store.end("function")
            except (frames.FrameChannelClosed, NotTransferable):
                raise
            except BaseException:  # the test has failed already
                pass
            raise
        self._store.end("function")

    def _class_begins(self, owner: Any, case: bool) -> None:
        if case:
            owner.setUpClass()
            self._store.at_end("class", owner.doClassCleanups)
            self._store.at_end("class", owner.tearDownClass)
            return
        _call(getattr(owner, "setup_class", None), owner)
        teardown = getattr(owner, "teardown_class", None)
        if teardown is not None:
            self._store.at_end("class", lambda: _call(teardown, owner))

    def _unit(self, item: Item) -> None:
        import unittest

        assert item.owner is not None and self._registry is not None
        instance = item.owner(item.originalname)
        filling = FixtureResolver(item, self._registry, self._store, instance)
        for name in self._registry.automatic(item.owner):
            filling.value(name)
        for mark in item.marks:
            for name in mark.args if mark.name == "usefixtures" else ():
                filling.value(name)
        result = unittest.TestResult()
        instance.run(result)
        if result.skipped:
            raise Skipped("skipped")
        for _, text in (*result.errors, *result.failures):
            raise AssertionError(text.strip().splitlines()[-1])
        if not result.wasSuccessful():
            raise AssertionError("unexpected success")

    def _function(self, item: Item) -> None:
        assert self._registry is not None
        instance = item.owner() if item.owner is not None else None
        code = getattr(item.function, "__func__", item.function)
        flags = code.__code__.co_flags
        if flags & (GENERATOR | ASYNC_GENERATOR):
            raise AssertionError("a test that yields is none")
        if instance is None:
            self._around("setup_function", "teardown_function", self._module, code)
        filling = FixtureResolver(item, self._registry, self._store, instance)
        for name in self._registry.automatic(item.owner):
            filling.value(name)
        if instance is not None:
            method = getattr(instance, item.originalname, code)
            self._around("setup_method", "teardown_method", instance, method)
        made = {n: filling.value(n) for n in item.names if n not in item.values}
        given = {n: item.values[n] if n in item.values else made[n] for n in item.wanted}
        function = item.function.__get__(instance, item.owner) if instance is not None else code
        if flags & COROUTINE:
            if not any(mark.name == "asyncio" for mark in item.marks):
                raise AssertionError("async def without pytest.mark.asyncio is not run")
            import asyncio

            asyncio.run(function(**given))
        else:
            function(**given)  # of what it returns, pytest warns

    def _around(self, setup: str, teardown: str, place: Any, argument: Any) -> None:
        _call(getattr(place, setup, None), argument)
        end = getattr(place, teardown, None)
        if end is not None:
            self._store.at_end("function", lambda: _call(end, argument))


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:TEXT]


def _with_finalizer(store: FixtureStore, value: Any, finalizer: str) -> Any:
    """Return a fixture's value, whose `finalizer` method ends it with the test."""
    store.at_end("function", getattr(value, finalizer))
    return value


def _call(function: Any, *arguments: Any) -> None:
    """Call a setup or teardown, with its argument if it takes one."""
    if function is None:
        return
    code = getattr(function, "__func__", function).__code__
    taken = code.co_argcount - (1 if isinstance(function, types.MethodType) else 0)
    function(*arguments[:taken])


def _is_condition_true(mark: TestMark, item: Item) -> bool:
    """Return whether one of the mark's conditions holds; true without any."""
    conditions = [*mark.args, *(mark.kwargs[key] for key in mark.kwargs if key == "condition")]
    scope = {"sys": sys, "os": __import__("os"), **vars(item.module)}
    return not conditions or any(eval(c, scope) if isinstance(c, str) else c for c in conditions)
