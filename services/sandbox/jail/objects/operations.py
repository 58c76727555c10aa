"""Operations that a jail applies to its objects for the other jail, and limits for a solution."""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import importlib
import io
import operator
import os
import sys
import types
from typing import Any, Callable

from . import coroutines
from .proxies import ARITHMETIC, ORDER, get_ref

BINARY = {f"__{name}__": getattr(operator, f"__{name}__") for name in ("eq", "ne", *ORDER)}
for _name in ARITHMETIC:
    _function = getattr(operator, f"__{_name}__")
    BINARY[f"__{_name}__"] = _function
    BINARY[f"__r{_name}__"] = lambda target, other, do=_function: do(other, target)
    BINARY[f"__i{_name}__"] = getattr(operator, f"__i{_name}__")
BINARY["__divmod__"] = divmod
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": abs,
    "__invert__": operator.invert,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__index__": operator.index,
    "__round__": round,
    "__bytes__": bytes,
    "__reversed__": reversed,
    "__format__": format,
    "__dir__": dir,
}


def _compare_equal(target: Any, other: Any) -> list[bool]:
    """Return whether both are equal, and whether `target` also equals an unknown object."""
    equal = bool(target == other)
    with contextlib.suppress(Exception):  # its `__eq__` may read attributes that only its class has
        return [equal, equal and bool(target == object())]
    return [equal, False]


def _is_inconsistent(target: Any, other: Any) -> bool:
    """Return whether `target` is both above and below the other."""
    with contextlib.suppress(Exception):  # one of the operators is missing
        return bool(target < other) and bool(target > other)
    return False


def to_builtin(target: Any) -> Any:
    """Convert an object whose class derives from list, dict or set to that type."""
    if isinstance(target, dict):
        return dict(dict.items(target))
    if isinstance(target, set):
        return set(set.__iter__(target))
    return list(list.__iter__(target) if isinstance(target, list) else target)


def _set_attribute(target: Any, name: str, value: Any) -> None:
    """Set an attribute; functions of the tests become methods, as functions of the solution do."""
    ref = get_ref(value)
    if isinstance(target, type) and ref is not None and ref.builtin_class is types.FunctionType:
        value = decode_member(("function", value, name, False))
    setattr(target, name, value)


def _derive_class(target: Any, name: str, bases: tuple[Any, ...], members: dict[str, Any]) -> Any:
    """Derive a class of the tests from the solution's."""
    own_members = {key: decode_member(value) for key, value in members.items()}
    return types.new_class(name, bases, {}, lambda space: space.update(own_members))


def decode_member(value: Any) -> Any:
    """Convert a function of the other side to one that becomes a method."""
    if type(value) is tuple and value and value[0] == "wrapped":
        _, kind, *parts = value
        return getattr(builtins, kind)(*map(decode_member, parts))
    if type(value) is tuple and value and value[0] == "function":
        _, function, name, abstract = value

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        method.__name__ = name
        if abstract:
            method.__isabstractmethod__ = True  # type: ignore[attr-defined]
        return method
    return value


def _list_public_names(target: Any) -> list[str]:
    exported = getattr(target, "__all__", None)
    return (
        list(exported)
        if exported is not None
        else [n for n in vars(target) if not n.startswith("_")]
    )


_ORIGINALS: dict[tuple[str, str], Any] = {}


def _patch(target: Any, module: str, name: str, value: Any) -> None:
    """Replace a name of a module by `value`; see `_restore`."""
    library_module = importlib.import_module(module)
    _ORIGINALS.setdefault((module, name), getattr(library_module, name, _ORIGINALS))
    setattr(library_module, name, value)


def _restore(target: Any, module: str, name: str) -> None:
    library_module = importlib.import_module(module)
    original = _ORIGINALS.pop((module, name), _ORIGINALS)
    if original is not _ORIGINALS:
        setattr(library_module, name, original)
    elif hasattr(library_module, name):
        delattr(library_module, name)


def _call_function(target: Any, module: str, name: str, args: Any, kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def _run_async_method(method: str) -> Callable[..., Any]:
    return lambda target, *args: coroutines.run_coroutine(
        getattr(type(target), method)(target, *args)
    )


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": lambda target, name: vars(target) if name == "__dict__" else getattr(target, name),
    "set": _set_attribute,
    "del": delattr,
    "len": len,
    "iter": iter,
    "next": next,
    "item": lambda target, key: target[key],
    "set_item": operator.setitem,
    "del_item": operator.delitem,
    "in": lambda target, value: value in target,
    "bool": bool,
    "hash": hash,
    "repr": repr,
    "str": str,
    "kind": type,
    "equal": _compare_equal,
    "inconsistent": _is_inconsistent,
    "content": to_builtin,
    "instance": lambda target, value: isinstance(value, target),
    "is_a": isinstance,
    "is_subclass": issubclass,
    "callable": callable,
    "subclass": lambda target, value: issubclass(value, target),
    "derive": _derive_class,
    "super": lambda target, kind, name: getattr(super(kind, target), name),
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target, *error: type(target).__exit__(target, *error),
    "await": coroutines.run_coroutine,
    "aiter": lambda target: type(target).__aiter__(target),
    "anext": _run_async_method("__anext__"),
    "aenter": _run_async_method("__aenter__"),
    "aexit": _run_async_method("__aexit__"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "names": _list_public_names,
    "patch": _patch,
    "restore": _restore,
    "call_named": _call_function,
    "operator": lambda target, name, *others: {**BINARY, **CONVERSIONS}[name](target, *others),
}

MAX_PRINTED_CHARACTERS = 1 << 20  # most characters of an operation's output that are sent


class RecordedOutput:
    """Output of an operation, recorded while it runs."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._content = io.BytesIO(), io.BytesIO()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="", write_through=True)
            for raw in self._content
        )
        self._streams = sys.stdout, sys.stderr

    def stop(self) -> None:
        sys.stdout, sys.stderr = self._before

    def read(self) -> list[str]:
        """Return the text of standard output and error."""
        for stream in self._streams:
            stream.flush()
        return [
            raw.getvalue()[:MAX_PRINTED_CHARACTERS].decode("utf-8", "replace")
            for raw in self._content
        ]


# -- permitted operations of the solution on objects that it was passed

CALLABLE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
ALWAYS_ALLOWED = (
    "bool",
    "hash",
    "kind",
    "await",
    "call",
    "iter",
    "next",
)  # operations for which objects are passed
TESTS_ONLY = ("content", "derive", "super", "names", "patch", "restore", "call_named")
ALLOWED_ATTRIBUTES = ("__name__", "__qualname__", "__doc__", "__module__")
ALLOWED_LIBRARY_CLASSES = {
    ("_io", "StringIO"),
    ("_io", "BytesIO"),
    ("_io", "TextIOWrapper"),
    ("random", "Random"),
}
MOCKS = ("unittest.mock",)
DENIED_MOCK_ATTRIBUTES = (
    "assert",
    "call",
    "mock",
    "method_calls",
    "return_value",
    "side_effect",
    "reset",
)


def has_public_interface(target: Any) -> bool:
    """Return whether the public attributes of an object are an interface.

    True for objects of classes that the tests define, mocks, and objects of few classes of the
    standard library.
    """
    kind = type(target)
    known = (
        kind.__module__ in (*MOCKS, "tests")
        or (kind.__module__, kind.__name__) in ALLOWED_LIBRARY_CLASSES
    )
    return known and not isinstance(target, type)


def is_allowed(operation: str, target: Any, arguments: list[Any]) -> bool:
    """Return whether the solution may apply this operation."""
    if operation in ALWAYS_ALLOWED:
        return True
    if operation == "get" and arguments[0] in ALLOWED_ATTRIBUTES:
        return isinstance(target, CALLABLE)
    if operation in ("instance", "subclass"):
        return isinstance(target, type) and target.__module__ == "tests"
    if not has_public_interface(target):
        if operation == "operator":
            return arguments[0] in ("__eq__", "__ne__") and isinstance(target, CALLABLE)
        return operation in ("repr", "str", "callable") and isinstance(target, CALLABLE)
    mocked = type(target).__module__ in MOCKS
    if operation in ("get", "set", "del"):
        name = str(arguments[0])
        if name.startswith("_") or (mocked and name.startswith(DENIED_MOCK_ATTRIBUTES)):
            return False
        return operation == "get" or not (mocked or hasattr(type(target), name))
    return operation not in TESTS_ONLY


def can_hand_over(value: Any) -> bool:
    """Return whether the solution can use this object once it is passed to it."""
    kind = type(value)
    used = any(hasattr(kind, name) for name in ("__iter__", "__await__", "__aiter__"))
    return used or callable(value) or kind is object or has_public_interface(value)


# Modules whose names the solution may send to refer to objects of the tests' jail. Not the whole
# library: it has classes whose instances equal everything, as that of `unittest.mock.ANY`.
_SHARED_MODULES = (
    "builtins abc array bisect cmath collections collections.abc copy dataclasses datetime decimal "
    "enum fractions functools heapq inspect io itertools json logging math numbers operator os "
    "os.path posixpath pathlib random re statistics string struct sys time types typing uuid"
)
SHARED_MODULES = frozenset(_SHARED_MODULES.split())


def is_shared(module: str, value: Any) -> bool:
    """Return whether a module, or a class of it, is the same to both sides."""
    return module in SHARED_MODULES or (
        isinstance(value, type) and issubclass(value, BaseException)
    )


EXCLUDED_MODULES = {
    "antigravity",
    "this",
    "turtle",
    "turtledemo",
    "tkinter",
    "idlelib",
    "test",
    "__main__",
}


@functools.lru_cache(None)
def list_library_modules() -> frozenset[str]:
    """Return the names of the modules of the standard library."""
    known = getattr(sys, "stdlib_module_names", None)  # from Python 3.10 on
    if known is None:
        files = os.listdir(os.path.dirname(os.__file__))
        known = [*sys.builtin_module_names, *(name.partition(".")[0] for name in files)]
    return frozenset(known) - EXCLUDED_MODULES


def find_module(name: str) -> Any:
    """Return a module of the standard library by its name; None if there is none."""
    if name.split(".")[0] not in list_library_modules():
        return None
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


def find_class(module: str, name: str) -> Any:
    """Return a class of the standard library by its name; None if there is none."""
    found = getattr(find_module(module), name, None)
    return found if isinstance(found, type) else None
