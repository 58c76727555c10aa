"""What tests put in the place of something else: attributes, the environment, streams. What they
change in a module of the standard library is changed for the solution too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from collections import namedtuple
from typing import Any, Iterator

from ..objects.remote import Remote, place_of
from ..objects.side import Side

COROUTINE = 0x80  # flag of code, see `inspect`
MISSING = object()
KEPT = ("sys.stdout", "sys.stderr")  # of the tests alone: what the solution prints comes over
CaptureResult = namedtuple("CaptureResult", "out err")


def shared(target: Any, name: str) -> bool:
    """Whether a name is one of the standard library, which the solution has too."""
    return type(target) is types.ModuleType and f"{target.__name__}.{name}" not in KEPT


class MonkeyPatch:
    """pytest's `monkeypatch`."""

    side: Side

    @classmethod
    def of(cls, side: Side) -> type[MonkeyPatch]:
        return type("MonkeyPatch", (cls,), {"side": side})

    def __init__(self) -> None:
        self._undo: list[Any] = []

    @classmethod
    @contextlib.contextmanager
    def context(cls) -> Iterator[MonkeyPatch]:
        patch = cls()
        try:
            yield patch
        finally:
            patch.undo()

    def setattr(self, target: Any, name: Any, value: Any = MISSING, raising: bool = True) -> None:
        if value is MISSING:
            value, (target, name) = name, found(target)
        old = getattr(target, name, MISSING)
        if old is MISSING and raising:
            raise AttributeError(f"{target!r} has no attribute {name!r}")
        if isinstance(target, type):  # a static method stays one
            members = target.__dict__
            old = members[name] if name in members else MISSING  # noqa: SIM401 (it may be remote)
        set_both(self.side, target, name, value)
        self._undo.append(lambda: restore_both(self.side, target, name, old))

    def delattr(self, target: Any, name: Any = MISSING, raising: bool = True) -> None:
        if name is MISSING:
            target, name = found(target)
        old = getattr(target, name, MISSING)
        if old is MISSING:
            if raising:
                raise AttributeError(name)
            return
        delattr(target, name)
        self._undo.append(lambda: setattr(target, name, old))

    def setitem(self, mapping: Any, name: Any, value: Any) -> None:
        old = mapping[name] if name in mapping else MISSING  # noqa: SIM401 (it may be remote)
        mapping[name] = value
        self._undo.append(lambda: _put(mapping, name, old))

    def delitem(self, mapping: Any, name: Any, raising: bool = True) -> None:
        if name not in mapping and not raising:
            return
        old = mapping[name]
        del mapping[name]
        self._undo.append(lambda: _put(mapping, name, old))

    def setenv(self, name: str, value: Any, prepend: Any = None) -> None:
        if prepend and name in os.environ:
            value = f"{value}{prepend}{os.environ[name]}"
        self.setitem(os.environ, name, str(value))

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    def syspath_prepend(self, path: Any) -> None:
        self.side.refuse("monkeypatch.syspath_prepend")

    def chdir(self, path: Any) -> None:
        self.side.refuse("monkeypatch.chdir")

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _put(mapping: Any, name: Any, value: Any) -> None:
    if value is not MISSING:
        mapping[name] = value
    elif name in mapping:
        del mapping[name]


def found(path: str) -> tuple[Any, str]:
    """What holds the last part of a dotted path, and that part."""
    first, *rest, name = path.split(".")
    target: Any = __import__(first)
    for part in rest:
        if not hasattr(target, part):
            __import__(f"{target.__name__}.{part}")
        target = getattr(target, part)
    return target, name


def set_both(side: Side, target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)
    if shared(target, name):
        side.ask("patch", 0, target.__name__, name, value)


def restore_both(side: Side, target: Any, name: str, old: Any) -> None:
    if old is MISSING:
        delattr(target, name)
    else:
        setattr(target, name, old)
    if shared(target, name):
        side.ask("restore", 0, target.__name__, name)


def watch_mock(side: Side) -> None:
    """What `unittest.mock.patch` changes in a module of the standard library, the solution sees."""
    from unittest import mock

    kind: Any = mock._patch
    enter, leave = kind.__enter__, kind.__exit__

    def entered(self: Any) -> Any:
        value = enter(self)
        if shared(self.target, self.attribute):
            new = getattr(self.target, self.attribute)
            side.ask("patch", 0, self.target.__name__, self.attribute, new)
        return value

    def left(self: Any, *error: Any) -> Any:
        if shared(self.target, self.attribute):
            side.ask("restore", 0, self.target.__name__, self.attribute)
        return leave(self, *error)

    kind.__enter__, kind.__exit__ = entered, left
    own = mock._is_async_obj  # type: ignore[attr-defined]

    def is_async(value: Any) -> bool:
        if type(value) is Remote:
            return place_of(value).builtin is types.FunctionType and bool(
                value.__code__.co_flags & COROUTINE
            )
        return bool(own(value))

    mock._is_async_obj = is_async  # type: ignore[attr-defined]


def watch_random(side: Side) -> None:
    """`random.seed` in a test is for the solution."""
    import random

    own = random.seed

    def seed(*args: Any) -> None:
        own(*args)
        side.ask("call_named", 0, "random", "seed", list(args))

    random.seed = seed  # type: ignore[assignment]


class Captured:
    """`capsys` and `capfd`: what is printed while the test runs."""

    def __init__(self) -> None:
        self._streams = io.StringIO(), io.StringIO()
        self._before = sys.stdout, sys.stderr
        self._start()

    def _start(self) -> None:
        sys.stdout, sys.stderr = self._streams

    def stop(self) -> None:
        sys.stdout, sys.stderr = self._before

    def readouterr(self) -> CaptureResult:
        texts = [stream.getvalue() for stream in self._streams]
        for stream in self._streams:
            stream.seek(0)
            stream.truncate()
        return CaptureResult(*texts)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self._start()
