"""Proxies of the other jail's objects, and the rules for comparisons with them.

Where a test expects plain data, an object that equals everything must not pass. The rules:

- No object of the solution decides by itself that it equals data, or is above or below it.
- An object whose class derives from a built-in type is compared by its content, as data.
- The solution compares two of its objects, unless they equal an object unknown to them.
- Arithmetic and `in` are permitted on an instance that the test itself made, by calling a name of
  the solution that begins with a capital.
- An object that has seen data in arithmetic returns no value that decides a test.
- If a class (a name in CamelCase) claims to equal data, the claim cannot be distinguished from a
  forgery: the operation is rejected with its name.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from . import value_codec
from .remote_exceptions import RemoteExceptionMeta

if TYPE_CHECKING:
    from .object_connection import ObjectConnection

MAKER_KINDS = ("", "capital", "class")  # see `RemoteRef.maker_kind`
TESTS = "tests"  # name of the module that holds them
ORDER = ("lt", "le", "gt", "ge")
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
ARITHMETIC = _ARITHMETIC.split()
DIFFERENCE_OPERATORS = ("sub", "rsub", "isub", "xor", "rxor")  # of tests for closeness
_CONVERSIONS = "neg pos abs invert int float complex index round bytes reversed format dir"
CONVERSIONS = _CONVERSIONS.split()
_FUNCTION_ATTRIBUTES = "__code__ __name__ __qualname__ __defaults__ __kwdefaults__ __annotations__"
FUNCTION_ATTRIBUTES = _FUNCTION_ATTRIBUTES.split()


class RemoteRef:
    """Reference to an object of the other side, and the operations permitted on it."""

    builtin_class: type[Any] | None = None  # the object's class, if that is a built-in one
    builtin_base: type[Any] | None = None  # list, dict or set, if its class derives from it
    compares_by_identity = False  # the object equals itself only
    maker_kind = ""  # calling it makes instances under test: "class"; "capital": a name like GCD
    made_by = ""  # `maker_kind` of the object that made it
    is_imported = False  # the tests have imported it
    is_made_by_test = False  # the test itself has called the maker by name
    has_seen_data = False  # the object has seen data in arithmetic

    def __init__(self, connection: ObjectConnection, number: int, kind: str) -> None:
        self.connection, self.number, self.kind = connection, number, kind

    def request(self, operation: str, *arguments: Any) -> Any:
        """Request an operation on this object; see `ObjectConnection.request`."""
        return self.connection.request(operation, self.number, *arguments)

    def record_name(self, name: str, is_imported: bool = False) -> None:
        """Record the name that reached this object.

        Of several names that tests import, the one with the fewest rights counts.
        """
        kind = classify_name(name)
        if is_imported and self.is_imported:
            self.maker_kind = min(self.maker_kind, kind, key=MAKER_KINDS.index)
        elif is_imported or not self.maker_kind:
            self.maker_kind = kind
        self.is_imported = self.is_imported or is_imported

    def reject(self, what: str, by_solution: bool = False) -> NoReturn:
        """Reject an operation on this object; see `ObjectConnection.reject`."""
        self.connection.reject(what, by_solution)


def get_own_ref(proxy: RemoteProxy) -> RemoteRef:
    """Return the RemoteRef of a RemoteProxy."""
    ref: RemoteRef = object.__getattribute__(proxy, "_remote_ref")
    return ref


def get_ref(value: Any) -> RemoteRef | None:
    """Return the RemoteRef of a proxy; None for any other object."""
    kind = type(value)
    if kind is RemoteProxy:
        return get_own_ref(value)
    ref: RemoteRef | None = None
    if (
        isinstance(kind, DataProxyMeta)
        or isinstance(value, BaseException)
        or (isinstance(kind, type) and issubclass(kind, RemoteExceptionMeta))
    ):
        ref = vars(value).get("_remote_ref")
    return ref


def classify_name(name: str) -> str:
    """Return the `maker_kind` of a callable with this name."""
    if not name[:1].isupper():
        return ""
    return "class" if any(letter.islower() for letter in name) else "capital"


class RemoteProxy:
    """Proxy of an object of the other jail."""

    __slots__ = ("_remote_ref",)

    def __init__(self, ref: RemoteRef) -> None:
        object.__setattr__(self, "_remote_ref", ref)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        ref = get_own_ref(self)
        if ref.builtin_class is not None or ref.builtin_base is not None:
            return ref.builtin_class or ref.builtin_base
        if ref.connection.is_trusted and sys._getframe(1).f_globals.get("__name__") == TESTS:
            return ref.request("kind")
        return RemoteProxy

    __doc__ = property(lambda self: get_own_ref(self).request("get", "__doc__"))

    def __getattr__(self, name: str) -> Any:
        ref = get_own_ref(self)
        if name.startswith("__") and name.endswith("__") and not is_dunder_allowed(ref, name):
            raise AttributeError(name)
        value = ref.request("get", name)
        value_ref = get_ref(value)
        if value_ref is not None:
            value_ref.record_name(name)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ref = get_own_ref(self)
        value = ref.request("call", list(args), kwargs)
        if ref.maker_kind and type(value) is RemoteProxy:
            result_ref = get_own_ref(value)
            result_ref.made_by, result_ref.is_made_by_test = ref.maker_kind, True
        return value

    def __hash__(self) -> int:
        ref = get_own_ref(self)
        if ref.compares_by_identity:
            return hash(("remote", ref.number))
        return int(ref.request("hash"))

    def __len__(self) -> int:
        return int(_require_no_data_seen(self).request("len"))

    def __iter__(self) -> Any:
        return get_own_ref(self).request("iter")

    def __contains__(self, value: Any) -> bool:
        ref = get_own_ref(self)
        if ref.builtin_base is not None:
            return value in ref.request("content")
        if ref.made_by or get_ref(value) is not None or not ref.connection.is_trusted:
            return bool(ref.request("in", value))
        return any(item is value or item == value for item in self)

    def __bool__(self) -> bool:
        return bool(_require_no_data_seen(self).request("bool"))

    def __repr__(self) -> str:
        return str(get_own_ref(self).request("repr"))

    def __str__(self) -> str:
        return str(get_own_ref(self).request("str"))

    def __eq__(self, other: Any) -> Any:
        ref = get_own_ref(self)
        if type(other) is RemoteProxy:
            other_ref = get_own_ref(other)
            if ref.number == other_ref.number and ref.compares_by_identity:
                return True
            if ref.compares_by_identity and other_ref.compares_by_identity:
                return False
            if not ref.connection.is_trusted:
                return bool(ref.request("operator", "__eq__", other))
            equal, equals_unknown = ref.request("equal", other)
            return equal is True and equals_unknown is False
        if ref.builtin_base is not None and isinstance(other, ref.builtin_base):
            return ref.request("content") == other
        if not ref.connection.is_trusted:
            return not ref.compares_by_identity and bool(ref.request("operator", "__eq__", other))
        if not _is_data(other):
            return NotImplemented  # an object of the tests, such as approx or ANY
        claims = ref.request("equal", other) if ref.made_by else None
        if claims == [True, False] and ref.made_by == "class" and ref.is_made_by_test:
            what = f"equality of a {ref.kind} with plain data, by its own `__eq__`"
            ref.reject(what, by_solution=True)
        return False

    def __instancecheck__(self, value: Any) -> bool:
        return get_ref(value) is not None and bool(get_own_ref(self).request("instance", value))

    def __subclasscheck__(self, value: Any) -> bool:
        return get_ref(value) is not None and bool(get_own_ref(self).request("subclass", value))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return get_own_ref(self).request("exit", kind, error, None)

    def __deepcopy__(self, memo: Any) -> Any:
        return get_own_ref(self).request("deepcopy")

    def __await__(self) -> Any:
        return get_own_ref(self).request("await")
        yield

    async def __anext__(self) -> Any:
        return get_own_ref(self).request("anext")

    async def __aenter__(self) -> Any:
        return get_own_ref(self).request("aenter")

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return get_own_ref(self).request("aexit", kind, error, None)

    def __mro_entries__(self, bases: Any) -> Any:
        from . import remote_subclasses

        return (remote_subclasses.make_base(self),)


def is_dunder_allowed(ref: RemoteRef, name: str) -> bool:
    """Return whether the tests themselves, or a decorator, read a name like `__name__`."""
    if not ref.connection.is_trusted:
        return name in ("__name__", "__qualname__", "__doc__", "__module__")
    if ref.builtin_class is types.FunctionType and name in FUNCTION_ATTRIBUTES:
        return True
    if ref.builtin_class is type and name == "__dict__":  # `mock.patch` reads these first
        return True
    return sys._getframe(2).f_globals.get("__name__") == TESTS


def _require_no_data_seen(target: RemoteProxy) -> RemoteRef:
    """Return the reference of an object that may decide a test; TypeError if it has seen data."""
    ref = get_own_ref(target)
    if ref.has_seen_data:
        raise TypeError(f"a verdict of a {ref.kind} of the solution, where data was due")
    return ref


def _is_data(value: Any) -> bool:
    return (
        isinstance(value, (*value_codec.DATA, *value_codec.CONTAINER_TYPES, tuple, frozenset))
        or value is ...
        or value_codec.find_library_type(value) is not None
    )


def _make_order_operator(name: str) -> Callable[..., Any]:
    def operator(self: RemoteProxy, other: Any) -> Any:
        ref = get_own_ref(self)
        if ref.builtin_base is not None and isinstance(other, ref.builtin_base):
            return getattr(ref.request("content"), f"__{name}__")(other)
        if type(other) is not RemoteProxy and ref.connection.is_trusted:
            if not ref.made_by or not _is_data(other):
                return NotImplemented
            ref.request("operator", f"__{name}__", other)
            if (
                ref.made_by == "class"
                and ref.is_made_by_test
                and not ref.request("inconsistent", other)
            ):
                what = f"order of a {ref.kind} and plain data, by its own `__{name}__`"
                ref.reject(what, by_solution=True)
            return NotImplemented
        return ref.request("operator", f"__{name}__", other)

    return operator


def _make_arithmetic_operator(name: str) -> Callable[..., Any]:
    def operator(self: RemoteProxy, other: Any) -> Any:
        ref = get_own_ref(self)
        if (
            ref.builtin_base is not None
            and isinstance(other, ref.builtin_base)
            and not name.startswith("i")
        ):
            value = (
                None
                if name in DIFFERENCE_OPERATORS
                else ref.request("operator", f"__{name}__", other)
            )
            if type(value) is RemoteProxy:  # of the same class, and compared by its content
                return value
            return getattr(ref.request("content"), f"__{name}__")(other)
        value = ref.request("operator", f"__{name}__", other)
        if not ref.connection.is_trusted:
            return value
        result_ref = get_ref(value)
        if result_ref is not None:
            result_ref.is_made_by_test = False
        if type(other) is RemoteProxy:
            other_ref = get_own_ref(other)
            if result_ref is not None:
                result_ref.made_by = result_ref.made_by or ref.made_by or other_ref.made_by
                result_ref.has_seen_data = (
                    result_ref.has_seen_data or ref.has_seen_data or other_ref.has_seen_data
                )
            elif ref.has_seen_data or other_ref.has_seen_data:
                raise TypeError(f"data for {name} of objects of the solution that have seen data")
        elif result_ref is not None:
            result_ref.made_by = result_ref.made_by or ref.made_by
            result_ref.has_seen_data = result_ref.has_seen_data or ref.made_by != "class"
        elif ref.made_by != "class" or name in DIFFERENCE_OPERATORS:
            # The solution may have seen the expected value.
            raise TypeError(f"data for {name} of an object of the solution and data")
        return value

    return operator


def _make_conversion(name: str) -> Callable[..., Any]:
    def operator(self: RemoteProxy, *others: Any) -> Any:
        ref = get_own_ref(self)
        value = ref.request("operator", f"__{name}__", *others)
        if not ref.has_seen_data:
            return value
        if type(value) is not RemoteProxy:
            raise TypeError(f"a verdict of a {ref.kind} of the solution, where data was due")
        get_own_ref(value).has_seen_data = True
        return value

    return operator


def _make_forwarder(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: get_own_ref(self).request(operation, *arguments)


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
