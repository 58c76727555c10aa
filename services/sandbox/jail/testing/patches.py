"""Replacements that tests make: attributes, the environment, streams.

Their changes to a module of the standard library also apply to the solution.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from collections import namedtuple
from typing import Any, Callable, Iterator

from ..objects.object_connection import ObjectConnection
from ..objects.proxies import RemoteProxy, get_own_ref, get_ref

COROUTINE = 0x80  # flag of code, see `inspect`
MISSING = object()
TESTS_ONLY_NAMES = (
    "sys.stdout",
    "sys.stderr",
)  # replaced on the side of the tests only: they receive the solution's output
CaptureResult = namedtuple("CaptureResult", "out err")


def is_shared_name(target: Any, name: str) -> bool:
    """Return whether a name is one of the standard library, which the solution has too."""
    return type(target) is types.ModuleType and f"{target.__name__}.{name}" not in TESTS_ONLY_NAMES


class MonkeyPatch:
    """Implementation of pytest's `monkeypatch`."""

    connection: ObjectConnection

    @classmethod
    def for_connection(cls, connection: ObjectConnection) -> type[MonkeyPatch]:
        return type("MonkeyPatch", (cls,), {"connection": connection})

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
            value, (target, name) = name, resolve_path(target)
        old = getattr(target, name, MISSING)
        if old is MISSING and raising:
            raise AttributeError(f"{target!r} has no attribute {name!r}")
        if isinstance(target, type):  # a static method remains static
            members = target.__dict__
            old = members[name] if name in members else MISSING  # noqa: SIM401 (it may be remote)
        setattr(target, name, value)
        if is_shared_name(target, name):
            self.connection.request("patch", 0, target.__name__, name, value)
        self._undo.append(lambda: self._restore(target, name, old))

    def _restore(self, target: Any, name: str, old: Any) -> None:
        if old is MISSING:
            delattr(target, name)
        else:
            setattr(target, name, old)
        if is_shared_name(target, name):
            self.connection.request("restore", 0, target.__name__, name)

    def delattr(self, target: Any, name: Any = MISSING, raising: bool = True) -> None:
        if name is MISSING:
            target, name = resolve_path(target)
        old = getattr(target, name, MISSING)
        if old is not MISSING:
            delattr(target, name)
            self._undo.append(lambda: setattr(target, name, old))
        elif raising:
            raise AttributeError(name)

    def setitem(self, mapping: Any, name: Any, value: Any) -> None:
        old = mapping[name] if name in mapping else MISSING  # noqa: SIM401 (it may be remote)
        mapping[name] = value
        self._undo.append(lambda: _restore_item(mapping, name, old))

    def delitem(self, mapping: Any, name: Any, raising: bool = True) -> None:
        if name not in mapping and not raising:
            return
        old = mapping[name]
        del mapping[name]
        self._undo.append(lambda: _restore_item(mapping, name, old))

    def setenv(self, name: str, value: Any, prepend: Any = None) -> None:
        if prepend and name in os.environ:
            value = f"{value}{prepend}{os.environ[name]}"
        self.setitem(os.environ, name, str(value))

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    def syspath_prepend(self, path: Any) -> None:
        self.connection.reject("monkeypatch.syspath_prepend")

    def chdir(self, path: Any) -> None:
        before = os.getcwd()
        self._change_directory(str(path))
        self._undo.append(lambda: self._change_directory(before))

    def _change_directory(self, path: str) -> None:
        if self.connection.file_sync is None:
            self.connection.reject("monkeypatch.chdir")
        os.chdir(path)
        self.connection.request("call_named", 0, "os", "chdir", [path], {})

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore_item(mapping: Any, name: Any, value: Any) -> None:
    if value is not MISSING:
        mapping[name] = value
    elif name in mapping:
        del mapping[name]


def resolve_path(path: str) -> tuple[Any, str]:
    """Return the owner of the last part of a dotted path, and that part."""
    first, *rest, name = path.split(".")
    target: Any = __import__(first)
    for part in rest:
        if not hasattr(target, part):
            __import__(f"{target.__name__}.{part}")
        target = getattr(target, part)
    return target, name


def forward_mock_patches(connection: ObjectConnection) -> None:
    """Forward changes of `unittest.mock.patch` to the standard library to the solution."""
    from unittest import mock

    kind: Any = mock._patch
    enter, leave = kind.__enter__, kind.__exit__

    def enter_and_forward(self: Any) -> Any:
        value, target, name = enter(self), self.target, self.attribute
        if is_shared_name(target, name):
            connection.request("patch", 0, target.__name__, name, getattr(target, name))
        return value

    def restore_and_leave(self: Any, *error: Any) -> Any:
        if is_shared_name(self.target, self.attribute):
            connection.request("restore", 0, self.target.__name__, self.attribute)
        return leave(self, *error)

    kind.__enter__, kind.__exit__ = enter_and_forward, restore_and_leave
    original = mock._is_async_obj  # type: ignore[attr-defined]

    def is_async(value: Any) -> bool:
        if type(value) is not RemoteProxy:
            return bool(original(value))
        is_function = get_own_ref(value).builtin_class is types.FunctionType
        return is_function and bool(value.__code__.co_flags & COROUTINE)

    mock._is_async_obj = is_async  # type: ignore[attr-defined]


_INSPECT_FUNCTIONS = (
    "signature isabstract iscoroutinefunction isgeneratorfunction isasyncgenfunction"
)
# Introspection functions of the standard library: those of the solution's objects run there.
INTROSPECTION_FUNCTIONS = {
    "dataclasses": "asdict astuple fields is_dataclass replace",
    "inspect": f"{_INSPECT_FUNCTIONS} getsource getdoc getmembers getfullargspec",
    "asyncio": "iscoroutinefunction",
    "typing": "get_type_hints",
    "pickle": "dumps loads",
    "sys": "getsizeof",
}


def forward_introspection(connection: ObjectConnection, source: str) -> None:
    """Forward introspection of the solution's objects to the solution; `random.seed` sets both."""
    for module, names in INTROSPECTION_FUNCTIONS.items():
        if module in source:
            library_module = __import__(module)
            for name in names.split():
                setattr(
                    library_module,
                    name,
                    _make_forwarder(connection, module, name, getattr(library_module, name)),
                )
    if "random" in source and "seed" in source:
        import random

        original = random.seed

        def seed(*args: Any) -> None:
            original(*args)
            connection.request("call_named", 0, "random", "seed", list(args), {})

        random.seed = seed  # type: ignore[assignment]


def _make_forwarder(
    connection: ObjectConnection, module: str, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if name == "loads" or any(get_ref(value) is not None for value in args):
            return connection.request("call_named", 0, module, name, list(args), kwargs)
        return original(*args, **kwargs)

    return forward


class TempPathFactory:
    """Implementation of `tmp_path_factory`, in the scratch directory, which both sides have."""

    def __init__(self, root: str) -> None:
        self._root = os.path.join(root, "pytest")

    def mktemp(self, basename: str, numbered: bool = True) -> Any:
        import pathlib

        os.makedirs(self._root, exist_ok=True)
        number = len(os.listdir(self._root))
        path = pathlib.Path(self._root, f"{basename}{number}" if numbered else basename)
        path.mkdir()
        return path

    def getbasetemp(self) -> Any:
        import pathlib

        return pathlib.Path(self._root)


class CapturedOutput:
    """Implementation of `capsys` and `capfd`: the output while the test runs."""

    def __init__(self) -> None:
        self._streams = io.StringIO(), io.StringIO()
        self._before = sys.stdout, sys.stderr
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
            sys.stdout, sys.stderr = self._streams
