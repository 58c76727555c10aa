"""Reduction of values to plain data by their built-in content, to cross a jail's border."""

from __future__ import annotations

import sys
from typing import Any

DEPTH = 200  # nesting of one value
# integers beyond it cross as hexadecimal digits, which are read in linear time
MAX_PLAIN_INT = 1 << 63
PLAIN_TYPES = {bool, float, str, type(None)}  # unchanged
INT_KEY = "\0int"  # the key of such an integer; no other key begins with that character


class NotPlainData(Exception):
    """Error raised for a value that is no plain data."""


def to_jsonable(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON; NotPlainData for any other.

    Tuples and sets become lists, sets sorted, and keys text. Large integers become what
    `decode_number` reads.
    """
    if depth > DEPTH:
        raise NotPlainData(f"nested deeper than {DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        integer = int.__index__(value)
        return integer if -MAX_PLAIN_INT < integer < MAX_PLAIN_INT else {INT_KEY: "%x" % integer}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if kinds <= PLAIN_TYPES or (
            kinds == {int} and min(value) > -MAX_PLAIN_INT and max(value) < MAX_PLAIN_INT
        ):
            return list(value)  # long lists of numbers are common
        return [to_jsonable(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        try:
            items = sorted(value)
        except TypeError:  # items of several kinds
            items = sorted(value, key=repr)
        return [to_jsonable(item, depth + 1) for item in items]
    if isinstance(value, dict):
        found = {_encode_key(key): to_jsonable(item, depth + 1) for key, item in value.items()}
        if len(found) < len(value):
            raise NotPlainData("two keys have the same text")
        return found
    return to_jsonable(_to_builtin(value), depth)


def decode_number(value: Any) -> Any:
    """Return the int or float that `to_jsonable` has packed, or None. ValueError: invalid
    digits.
    """
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get(INT_KEY), str):
        try:
            return int(value[INT_KEY], 16)
        except ValueError:
            return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def decode(value: Any) -> Any:
    """Decode what `to_jsonable` has packed, with large integers."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if INT_KEY in value:
            return decode_number(value)
        return {key: decode(item) for key, item in value.items()}
    return value


def _to_builtin(value: Any) -> Any:
    """Return the built-in number that equals one of the standard library's or of numpy's."""
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
            raise NotPlainData("a fraction exceeds the range of floats") from None
    raise NotPlainData(f"{type(value).__name__} is not plain data")


def _encode_key(key: Any) -> str:
    if isinstance(key, str):
        if key.startswith(INT_KEY[0]):
            raise NotPlainData("a key begins with a null character")
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return str(key)
    raise NotPlainData(f"a key has type {type(key).__name__}")
