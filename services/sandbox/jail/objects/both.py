"""Data that is an object, too: a named tuple, a member of an IntEnum."""

from __future__ import annotations

from typing import Any, Callable

from . import values
from .errors import asked
from .remote import ARITHMETIC, ORDER, Both, RemotePlace, is_wanted, place_of


def _attribute(self: Any, name: str) -> Any:
    place = vars(self)["_place"]
    if name.startswith("__") and not is_wanted(place, name):
        raise AttributeError(name)
    return place.ask("get", name)


_MEMBERS = {
    "__getattr__": _attribute,
    "__repr__": lambda self: str(vars(self)["_place"].ask("repr")),
    "__str__": lambda self: str(vars(self)["_place"].ask("str")),
    "__format__": asked("operator", "__format__"),
}
_CLASSES: dict[Any, Any] = {}
_UNARY = ("neg", "pos", "abs", "invert", "len", "iter", "bool", "call")
_NAMES = (*ARITHMETIC, *ORDER, *(f"r{name}" for name in ARITHMETIC), *_UNARY)
_CHANGED = frozenset(f"__{name}__" for name in _NAMES)
_ASKED = {"__len__": "len", "__iter__": "iter", "__bool__": "bool"}


def overridden(kind: Any, base: Any) -> list[str]:
    """Operators and public methods of data that a class which derives from it defines anew."""
    names = [*(name for name in dir(base) if not name.startswith("_")), *_CHANGED]
    return [n for n in names if getattr(kind, n, None) is not getattr(base, n, None)]


def _redefined(name: str, base: Any) -> Callable[..., Any]:
    """An operator or method of the solution's in place of that of data. With data on the other side
    of it, of numbers and sets that of data decides: it may be the difference to what is expected.
    """
    exact = base in (int, float, complex, frozenset)

    def method(self: Any, *others: Any, **named: Any) -> Any:
        place = vars(self)["_place"]
        if not name.startswith("__"):
            return place.ask("get", name)(*others, **named)
        if name == "__call__":
            return place.ask("call", list(others), named)
        ordered = name.strip("_") in ORDER
        if others and place_of(others[0]) is None and (exact or ordered):
            plain = getattr(base, name, None)
            return NotImplemented if plain is None else plain(self, *others)
        return place.ask(*([_ASKED[name]] if name in _ASKED else ["operator", name]), *others)

    return method


def both(data: Any, place: RemotePlace, own: tuple[str, ...]) -> Any:
    """Data whose other attributes are those of an object of the other side, and `own` of those that
    data has.
    """
    base = type(data)
    if base not in values.BASES:
        raise ValueError("an object that is data and is none")
    if (base, own) not in _CLASSES:
        names = [name for name in own if name in _CHANGED or not name.startswith("_")]
        members = {**_MEMBERS, **{name: _redefined(name, base) for name in names}}
        _CLASSES[base, own] = Both(base.__name__, (base,), members)
    made = _CLASSES[base, own](data)
    vars(made)["_place"] = place
    return made
