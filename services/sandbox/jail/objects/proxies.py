"""Proxies of the other jail's objects, with the rules of which side answers a test.

Where a test expects plain data, an object that answers yes to everything must not pass. The rules:
no object of the solution decides by itself that it equals data, or is above or below it. One whose
class derives from a built-in type is compared by its content, as data. Two objects of the solution
are compared by it, unless they equal an object unknown to them. Arithmetic and `in` are permitted
on an instance that the test itself made, by calling a name of the solution that begins with a
capital. An object that has seen data in arithmetic returns nothing that a test could take for a
verdict. Where a class (a name in CamelCase) does claim to equal data, its test is about that claim,
which cannot be told from a forgery: the operation is rejected by name.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Callable

from . import value_codec
from .remote_exceptions import RemoteExceptionMeta

MAKER_KINDS = ("", "capital", "class")  # see `RemoteRef.makes`
TESTS = "tests"  # name of the module that holds them
ORDER = ("lt", "le", "gt", "ge")
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
ARITHMETIC = _ARITHMETIC.split()
DIFFERENCE_OPERATORS = ("sub", "rsub", "isub", "xor", "rxor")  # a test for closeness begins with it
_CONVERSIONS = "neg pos abs invert int float complex index round bytes reversed format dir"
CONVERSIONS = _CONVERSIONS.split()
_FUNCTION_ATTRIBUTES = "__code__ __name__ __qualname__ __defaults__ __kwdefaults__ __annotations__"
FUNCTION_ATTRIBUTES = _FUNCTION_ATTRIBUTES.split()


class RemoteRef:
    """Location of an object, and the operations permitted on it."""

    builtin: Any = None  # its class, if that is a built-in one
    base: Any = None  # list, dict or set, if its class derives from it
    identity = False  # it equals itself only
    makes = ""  # calling it makes instances under test: "class", or "capital" for a name like GCD
    made = ""  # name of its maker
    named = False  # the tests have imported it
    direct = False  # by name, and the test did that
    seen = False  # it has seen data in arithmetic

    def __init__(self, side: Any, number: int, kind: str) -> None:
        self.side, self.number, self.kind = side, number, kind

    def ask(self, operation: str, *arguments: Any) -> Any:
        return self.side.ask(operation, self.number, *arguments)

    def reached(self, name: str, imported: bool = False) -> None:
        """Record the name that reached this object.

        Of several names that tests import, the one with the fewest rights counts.
        """
        makes = classify_name(name)
        if imported and self.named:
            self.makes = min(self.makes, makes, key=MAKER_KINDS.index)
        elif imported or not self.makes:
            self.makes = makes
        self.named = self.named or imported

    def refuse(self, what: str, provoked: bool = False) -> None:
        self.side.refuse(what, provoked)


def get_ref(value: Any) -> Any:
    """Return the RemoteRef of a proxy; None for any other object."""
    kind = type(value)
    if kind is RemoteProxy:
        return object.__getattribute__(value, "_remote")
    if isinstance(kind, DataProxyMeta) or isinstance(value, BaseException):
        return vars(value).get("_place")
    if isinstance(kind, type) and issubclass(kind, RemoteExceptionMeta):
        return vars(value).get("_place")
    return None


def classify_name(name: str) -> str:
    """Return what a call of this name of the solution makes."""
    if not name[:1].isupper():
        return ""
    return "class" if any(letter.islower() for letter in name) else "capital"


class RemoteProxy:
    """Proxy of an object of the other jail."""

    __slots__ = ("_remote",)

    def __init__(self, place: RemoteRef) -> None:
        object.__setattr__(self, "_remote", place)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        place = get_ref(self)
        if place.builtin is not None or place.base is not None:
            return place.builtin or place.base
        if place.side.trusted and sys._getframe(1).f_globals.get("__name__") == TESTS:
            return place.ask("kind")
        return RemoteProxy

    __doc__ = property(lambda self: get_ref(self).ask("get", "__doc__"))

    def __getattr__(self, name: str) -> Any:
        place = get_ref(self)
        if name.startswith("__") and name.endswith("__") and not is_dunder_allowed(place, name):
            raise AttributeError(name)
        value = place.ask("get", name)
        found = get_ref(value)
        if found is not None:
            found.reached(name)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = get_ref(self)
        value = place.ask("call", list(args), kwargs)
        if place.makes and type(value) is RemoteProxy:
            get_ref(value).made, get_ref(value).direct = place.makes, True
        return value

    def __hash__(self) -> int:
        place = get_ref(self)
        if place.identity:
            return hash(("remote", place.number))
        return int(place.ask("hash"))

    def __len__(self) -> int:
        return int(_require_no_data_seen(self).ask("len"))

    def __iter__(self) -> Any:
        return get_ref(self).ask("iter")

    def __contains__(self, value: Any) -> bool:
        place = get_ref(self)
        if place.base is not None:
            return value in place.ask("content")
        if place.made or get_ref(value) is not None or not place.side.trusted:
            return bool(place.ask("in", value))
        return any(item is value or item == value for item in self)

    def __bool__(self) -> bool:
        return bool(_require_no_data_seen(self).ask("bool"))

    def __repr__(self) -> str:
        return str(get_ref(self).ask("repr"))

    def __str__(self) -> str:
        return str(get_ref(self).ask("str"))

    def __eq__(self, other: Any) -> Any:
        place, theirs = get_ref(self), get_ref(other)
        if type(other) is RemoteProxy:
            if place.number == theirs.number and place.identity:
                return True
            if place.identity and theirs.identity:
                return False
            if not place.side.trusted:
                return bool(place.ask("operator", "__eq__", other))
            equal, foolish = place.ask("equal", other)
            return equal is True and foolish is False
        if place.base is not None and isinstance(other, place.base):
            return place.ask("content") == other
        if not place.side.trusted:
            return not place.identity and bool(place.ask("operator", "__eq__", other))
        if not _is_data(other):
            return NotImplemented  # an object of the tests: approx, ANY, and their own
        claims = place.ask("equal", other) if place.made else None
        if claims == [True, False] and place.made == "class" and place.direct:
            what = f"equality of a {place.kind} with plain data, by its own `__eq__`"
            place.refuse(what, provoked=True)
        return False

    def __instancecheck__(self, value: Any) -> bool:
        return get_ref(value) is not None and bool(get_ref(self).ask("instance", value))

    def __subclasscheck__(self, value: Any) -> bool:
        return get_ref(value) is not None and bool(get_ref(self).ask("subclass", value))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return get_ref(self).ask("exit", kind, error, None)

    def __deepcopy__(self, memo: Any) -> Any:
        return get_ref(self).ask("deepcopy")

    def __await__(self) -> Any:
        return get_ref(self).ask("await")
        yield

    async def __anext__(self) -> Any:
        return get_ref(self).ask("anext")

    async def __aenter__(self) -> Any:
        return get_ref(self).ask("aenter")

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return get_ref(self).ask("aexit", kind, error, None)

    def __mro_entries__(self, bases: Any) -> Any:
        from . import remote_subclasses

        return (remote_subclasses.make_base(self),)


def is_dunder_allowed(ref: RemoteRef, name: str) -> bool:
    """Return whether the tests themselves, or a decorator, read a name like `__name__`."""
    if not ref.side.trusted:
        return name in ("__name__", "__qualname__", "__doc__", "__module__")
    if ref.builtin is types.FunctionType and name in FUNCTION_ATTRIBUTES:
        return True
    if ref.builtin is type and name == "__dict__":  # `mock.patch` reads these first
        return True
    return sys._getframe(2).f_globals.get("__name__") == TESTS


def _require_no_data_seen(target: RemoteProxy) -> Any:
    """Return the reference of an object that has seen no data in arithmetic, and may give a
    verdict.
    """
    place = get_ref(target)
    if place.seen:
        raise TypeError(f"a verdict of a {place.kind} of the solution, where data was due")
    return place


def _is_data(value: Any) -> bool:
    return (
        isinstance(value, (*value_codec.DATA, *value_codec.CONTAINER_TYPES, tuple, frozenset))
        or value is ...
        or value_codec.find_library_type(value) is not None
    )


def _make_order_operator(name: str) -> Callable[..., Any]:
    def operator(self: RemoteProxy, other: Any) -> Any:
        place = get_ref(self)
        if place.base is not None and isinstance(other, place.base):
            return getattr(place.ask("content"), f"__{name}__")(other)
        if type(other) is not RemoteProxy and place.side.trusted:
            if not place.made or not _is_data(other):
                return NotImplemented
            place.ask("operator", f"__{name}__", other)
            if place.made == "class" and place.direct and not place.ask("foolish", other):
                what = f"order of a {place.kind} and plain data, by its own `__{name}__`"
                place.refuse(what, provoked=True)
            return NotImplemented
        return place.ask("operator", f"__{name}__", other)

    return operator


def _make_arithmetic_operator(name: str) -> Callable[..., Any]:
    def operator(self: RemoteProxy, other: Any) -> Any:
        place = get_ref(self)
        if place.base is not None and isinstance(other, place.base) and not name.startswith("i"):
            value = (
                None
                if name in DIFFERENCE_OPERATORS
                else place.ask("operator", f"__{name}__", other)
            )
            if type(value) is RemoteProxy:  # one of its own kind, which is compared by its content
                return value
            return getattr(place.ask("content"), f"__{name}__")(other)
        value = place.ask("operator", f"__{name}__", other)
        if not place.side.trusted:
            return value
        found, theirs = get_ref(value), get_ref(other)
        if found is not None:
            found.direct = False
        if type(other) is RemoteProxy:
            if found is not None:
                found.made = found.made or place.made or theirs.made
                found.seen = found.seen or place.seen or theirs.seen
            elif place.seen or theirs.seen:
                raise TypeError(f"data for {name} of objects of the solution that have seen data")
        elif found is not None:
            found.made = found.made or place.made
            found.seen = found.seen or place.made != "class"
        elif place.made != "class" or name in DIFFERENCE_OPERATORS:
            # It may have seen the expected value.
            raise TypeError(f"data for {name} of an object of the solution and data")
        return value

    return operator


def _make_conversion(name: str) -> Callable[..., Any]:
    def operator(self: RemoteProxy, *others: Any) -> Any:
        place = get_ref(self)
        value = place.ask("operator", f"__{name}__", *others)
        if not place.seen:
            return value
        if type(value) is not RemoteProxy:
            raise TypeError(f"a verdict of a {place.kind} of the solution, where data was due")
        get_ref(value).seen = True
        return value

    return operator


def _make_forwarder(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: get_ref(self).ask(operation, *arguments)


_FORWARDED = "next:next getitem:item setitem:set_item delitem:del_item enter:enter"
for _pair in f"{_FORWARDED} setattr:set delattr:del copy:copy aiter:aiter".split():
    _name, _operation = _pair.split(":")
    setattr(RemoteProxy, f"__{_name}__", _make_forwarder(_operation))
for _names, _make in (
    (ORDER, _make_order_operator),
    (ARITHMETIC, _make_arithmetic_operator),
    (CONVERSIONS, _make_conversion),
):
    for _name in _names:
        setattr(RemoteProxy, f"__{_name}__", _make(_name))
        if _make is _make_arithmetic_operator:
            setattr(RemoteProxy, f"__r{_name}__", _make(f"r{_name}"))
            setattr(RemoteProxy, f"__i{_name}__", _make(f"i{_name}"))
RemoteProxy.__divmod__ = _make_arithmetic_operator("divmod")  # type: ignore[operator]


class DataProxyMeta(type):
    """Metaclass of data that is also an object; see `make_data_proxy`."""
