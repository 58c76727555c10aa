"""Conversion between dataclasses and JSON values. Fields with their default are omitted.

A mapping whose keys are no strings becomes a list of pairs, a named tuple a list. Input must be
this module's own output: it is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON values."""
    if is_dataclass(value):
        found: dict[str, Any] = {}
        for one in fields(value):
            has = getattr(value, one.name)
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if default is MISSING or has != default:
                found[one.name] = to_json_value(has)
        return found
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json_value(one) for key, one in value.items()}
        return [[to_json_value(key), to_json_value(one)] for key, one in value.items()]
    if isinstance(value, frozenset):
        return sorted(value)
    return [to_json_value(one) for one in value] if isinstance(value, list | tuple) else value


def from_json_value(cls: type[T], value: Any) -> T:
    """Convert JSON values of `to_json_value` back to this type."""
    return cast(T, _decoder(cast(Any, cls))(value))


@cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    """Return the decoder of a type: `_identity` for types that JSON has."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        one = _decoder(next(some for some in of if some is not NoneType))
        return lambda value: None if value is None else one(value)
    if is_dataclass(hint):
        known = {name: _decoder(one) for name, one in get_type_hints(hint).items()}
        constructor = cast(Callable[..., Any], hint)
        return lambda value: constructor(**{name: known[name](one) for name, one in value.items()})
    if origin is Mapping:
        key, one = map(_decoder, of)
        return lambda value: {
            key(a): one(b) for a, b in (value.items() if isinstance(value, dict) else value)
        }
    if origin is tuple and of[-1] is not Ellipsis:
        each = [_decoder(some) for some in of]
        return lambda value: tuple(one(some) for one, some in zip(each, value, strict=True))
    if origin in (tuple, frozenset):
        one = _decoder(of[0])
        collection: Any = origin
        return lambda value: collection(map(one, value))
    if isinstance(hint, type) and issubclass(hint, tuple):
        named: Any = hint
        return lambda value: named(*value)
    return _identity


def _identity(value: Any) -> Any:
    return value
