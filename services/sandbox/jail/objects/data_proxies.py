"""Proxies of data that is also an object: a named tuple, a member of an IntEnum."""

from __future__ import annotations

from typing import Any, Callable

from . import value_codec
from .proxies import ARITHMETIC, ORDER, DataProxyMeta, RemoteRef, get_ref, is_dunder_allowed
from .remote_exceptions import make_remote_method


def _get_attribute(self: Any, name: str) -> Any:
    ref: RemoteRef = vars(self)["_remote_ref"]
    if name.startswith("__") and not is_dunder_allowed(ref, name):
        raise AttributeError(name)
    return ref.request("get", name)


def _request(self: Any, operation: str) -> Any:
    ref: RemoteRef = vars(self)["_remote_ref"]
    return ref.request(operation)


_MEMBERS = {
    "__getattr__": _get_attribute,
    "__repr__": lambda self: str(_request(self, "repr")),
    "__str__": lambda self: str(_request(self, "str")),
    "__format__": make_remote_method("operator", "__format__"),
}
_CLASS_CACHE: dict[Any, Any] = {}
_UNARY = ("neg", "pos", "abs", "invert", "len", "iter", "bool", "call")
_NAMES = (*ARITHMETIC, *ORDER, *(f"r{name}" for name in ARITHMETIC), *_UNARY)
_OVERRIDABLE = frozenset(f"__{name}__" for name in _NAMES)
_REMOTE_OPERATIONS = {"__len__": "len", "__iter__": "iter", "__bool__": "bool"}


def list_overridden(kind: Any, base: Any) -> list[str]:
    """Return the operators and public methods of data that a derived class overrides."""
    names = [*(name for name in dir(base) if not name.startswith("_")), *_OVERRIDABLE]
    return [n for n in names if getattr(kind, n, None) is not getattr(base, n, None)]


def _make_override(name: str, base: Any) -> Callable[..., Any]:
    """Return an operator or method of the solution's to override that of data.

    With data as the other operand, the operation of data decides for numbers and sets: the result
    may be the difference to the expected value.
    """
    exact = base in (int, float, complex, frozenset)

    def method(self: Any, *others: Any, **kwargs: Any) -> Any:
        ref: RemoteRef = vars(self)["_remote_ref"]
        if not name.startswith("__"):
            return ref.request("get", name)(*others, **kwargs)
        if name == "__call__":
            return ref.request("call", list(others), kwargs)
        ordered = name.strip("_") in ORDER
        if others and get_ref(others[0]) is None and (exact or ordered):
            plain = getattr(base, name, None)
            return NotImplemented if plain is None else plain(self, *others)
        return ref.request(
            *([_REMOTE_OPERATIONS[name]] if name in _REMOTE_OPERATIONS else ["operator", name]),
            *others,
        )

    return method


def make_data_proxy(data: Any, ref: RemoteRef, overridden_names: tuple[str, ...]) -> Any:
    """Return data whose overridden names, and further attributes, are those of a remote object."""
    base = type(data)
    if base not in value_codec.DATA_BASES:
        raise ValueError("an object of a type that is not data")
    if (base, overridden_names) not in _CLASS_CACHE:
        names = [
            name for name in overridden_names if name in _OVERRIDABLE or not name.startswith("_")
        ]
        members = {**_MEMBERS, **{name: _make_override(name, base) for name in names}}
        _CLASS_CACHE[base, overridden_names] = DataProxyMeta(base.__name__, (base,), members)
    proxy = _CLASS_CACHE[base, overridden_names](data)
    vars(proxy)["_remote_ref"] = ref
    return proxy
