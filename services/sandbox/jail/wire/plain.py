"""Reduces values to plain data by their built-in content, whatever their class, to cross a jail's
border.
"""

from __future__ import annotations

import sys
from typing import Any

DEPTH = 200  # nesting of one value
WORD = 1 << 63  # integers beyond it cross as hexadecimal digits, which are read in linear time
EASY = {bool, float, str, type(None)}  # as they are
MARK = "\0int"  # the key under which they do; no other key begins with that character


class Odd(Exception):
    """A value that is no plain data."""


def jsonable(value: Any, depth: int = 0) -> Any:
    """The value as JSON holds it: tuples and sets as lists, sets sorted, keys as text, large
    integers as `number` reads them; Odd for any other.
    """
    if depth > DEPTH:
        raise Odd(f"nested deeper than {DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        whole = int.__index__(value)
        return whole if -WORD < whole < WORD else {MARK: "%x" % whole}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if kinds <= EASY or (kinds == {int} and min(value) > -WORD and max(value) < WORD):
            return list(value)  # long lists of numbers are common
        return [jsonable(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        try:
            items = sorted(value)
        except TypeError:  # items of several kinds
            items = sorted(value, key=repr)
        return [jsonable(item, depth + 1) for item in items]
    if isinstance(value, dict):
        found = {_key(key): jsonable(item, depth + 1) for key, item in value.items()}
        if len(found) < len(value):
            raise Odd("keys of which two are the same text")
        return found
    return jsonable(_builtin(value), depth)


def number(value: Any) -> Any:
    """The int or float that `jsonable` has packed, or None if it is none. ValueError: garbage."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get(MARK), str):
        try:
            return int(value[MARK], 16)
        except ValueError:
            return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def unpacked(value: Any) -> Any:
    """What `jsonable` has packed, large integers among it."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if isinstance(value, dict):
        if MARK in value:
            return number(value)
        return {key: unpacked(item) for key, item in value.items()}
    return value


def _builtin(value: Any) -> Any:
    """The built-in number that equals one of the standard library's or of numpy's."""
    numbers, numpy = sys.modules.get("numbers"), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        found = value.item()
        if isinstance(found, (bool, int, float, str)):
            return found
    if numbers is not None and isinstance(value, numbers.Rational):
        if value.denominator == 1:
            return int(value.numerator)
        try:
            return float(value)
        except OverflowError:
            raise Odd("a fraction beyond all floats") from None
    raise Odd(f"{type(value).__name__} is no plain data")


def _key(key: Any) -> str:
    if isinstance(key, str):
        if key.startswith(MARK[0]):
            raise Odd("a key that begins with a null character")
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return str(key)
    raise Odd(f"a key of type {type(key).__name__}")
