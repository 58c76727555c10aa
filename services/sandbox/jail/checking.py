"""Runs tests against a solution in another jail. Its own jail holds no code that the model wrote.

Tests are a Python module with functions `test_*`, or classes `Test*` of them, that import from
`solution`. `pytest` here is what such tests use of it: raises, approx, mark.parametrize, fail.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import frames, remote

NAME = "tests.py"
TEXT = 300  # characters of what a failed test says


def run(program: dict[str, Any], channel: int, peer: int) -> None:
    """Reports each test as it begins and ends; only these frames carry the call's nonce."""
    nonce = program["nonce"]

    def report(**said: Any) -> None:
        frames.send(channel, {"nonce": nonce, **said})

    side = remote.Side(peer, trusted=True)
    try:
        ready = frames.receive(peer).get("ready") is True
    except (frames.Closed, AttributeError):
        ready = False
    sys.modules["solution"] = Solution(side)
    sys.modules["pytest"] = shim()
    try:
        tests = list(collected(program["source"])) if ready else []
    except frames.Closed:
        ready = False
    except BaseException as error:
        if side.failed or side.used:  # what the solution has, raises or returns is no help
            report(ready=False, tests=[])
            return
        report(broken=f"{type(error).__name__}: {error}"[:TEXT])
        return
    ready = ready and bool(tests or not side.used)  # it may have been asked for parameters
    report(ready=ready, tests=[name for name, _ in tests])
    if not ready:
        return
    while True:
        asked = frames.receive(channel)["test"]
        report(test=asked, **outcome(tests[asked][1]))


def outcome(test: Callable[[], None]) -> dict[str, Any]:
    try:
        test()
    except frames.Closed:
        return {"passed": False, "lost": True, "error": "the solution's process has ended"}
    except BaseException as error:
        return {"passed": False, "error": f"{type(error).__name__}: {error}"[:TEXT]}
    return {"passed": True, "error": ""}


def collected(source: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, what runs it) of each test in the order of the source."""
    module = types.ModuleType("tests")
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    exec(compile(source, NAME, "exec", dont_inherit=True), module.__dict__)
    for name, value in list(vars(module).items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            yield from cases(name, value)
        elif name.startswith("Test") and isinstance(value, type):
            for part, function in list(vars(value).items()):
                if part.startswith("test") and isinstance(function, types.FunctionType):
                    yield from cases(f"{name}.{part}", function, value)


def cases(
    name: str, function: Callable[..., None], owner: type[Any] | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
    for i, values in enumerate(getattr(function, "parametrized", [{}])):

        def test(values: dict[str, Any] = values) -> None:
            function(*([owner()] if owner else []), **values)

        yield (f"{name}[{i}]" if values else name), test


class Solution(types.ModuleType):
    """The module `solution`: its attributes are the other jail's objects."""

    def __init__(self, side: remote.Side) -> None:
        super().__init__("solution")
        self.__dict__["_side"] = side

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__["_side"].ask("get", 0, name)
        if isinstance(value, remote.Remote):
            remote.place_of(value).makes = name[0].isupper()
        return value


def shim() -> types.ModuleType:
    module = types.ModuleType("pytest")
    module.raises, module.approx, module.fail = raises, Approx, fail  # type: ignore[attr-defined]
    module.mark = types.SimpleNamespace(parametrize=parametrize)  # type: ignore[attr-defined]
    return module


class Raised:
    value: BaseException


@contextlib.contextmanager
def raises(kind: Any, match: str = "") -> Iterator[Raised]:
    """Does what pytest's does: `kind` is an exception class, one of the solution's, or a tuple of
    such.
    """
    found = Raised()
    try:
        yield found
    except frames.Closed:
        raise
    except BaseException as error:
        if not any(_is(error, k) for k in (kind if isinstance(kind, tuple) else (kind,))):
            raise
        if match and not re.search(match, str(error)):
            raise AssertionError(f"{error} does not match {match!r}") from None
        found.value = error
    else:
        raise AssertionError(f"did not raise {kind}")


def _is(error: BaseException, kind: Any) -> bool:
    if isinstance(kind, type):
        return isinstance(error, kind)
    own = getattr(error, "remote", None)
    return own is not None and isinstance(own, kind)


class Approx:
    """Does what pytest's does: compares numbers, and lists, tuples and dicts of them."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._absolute = 1e-12 if abs is None else abs
        self._relative = (0.0 if abs is not None else 1e-6) if rel is None else rel

    def __eq__(self, other: object) -> bool:
        return self._close(self._expected, other)

    def _close(self, wanted: Any, found: Any) -> bool:
        if isinstance(wanted, dict):
            return (
                isinstance(found, dict)
                and wanted.keys() == found.keys()
                and all(self._close(wanted[key], found[key]) for key in wanted)
            )
        if isinstance(wanted, (list, tuple)):
            return (
                isinstance(found, (list, tuple))
                and len(wanted) == len(found)
                and all(self._close(*pair) for pair in zip(wanted, found))
            )
        if not isinstance(found, (int, float)) or not isinstance(wanted, (int, float)):
            return bool(wanted == found)
        return math.isclose(wanted, found, rel_tol=self._relative, abs_tol=self._absolute)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"


def parametrize(names: Any, rows: Any) -> Callable[[Any], Any]:
    keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)

    def mark(function: Any) -> Any:
        earlier = getattr(function, "parametrized", [{}])
        function.parametrized = [
            {**dict(zip(keys, row if len(keys) > 1 else (row,))), **other}
            for row in rows
            for other in earlier
        ]
        return function

    return mark


def fail(reason: str = "") -> None:
    raise AssertionError(reason)
