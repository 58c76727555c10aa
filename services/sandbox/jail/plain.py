"""Reduces values to plain data by their built-in content, whatever their class, to cross a jail's
border.
"""

from __future__ import annotations

from typing import Any

DEPTH = 50


class Odd(Exception):
    """A value that is no plain data."""


def jsonable(value: Any, depth: int = 0) -> Any:
    """The value as JSON holds it: tuples and sets as lists, sets sorted, keys as text; Odd for any
    other.
    """
    if depth > DEPTH:
        raise Odd(f"nested deeper than {DEPTH}")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [jsonable(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        items = [jsonable(item, depth + 1) for item in value]
        try:
            return sorted(items)
        except TypeError:  # items of several kinds
            return sorted(items, key=repr)
    if isinstance(value, dict):
        return {_key(key): jsonable(item, depth + 1) for key, item in value.items()}
    raise Odd(f"{type(value).__name__} is no plain data")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return str(key)
    raise Odd(f"a key of type {type(key).__name__}")
