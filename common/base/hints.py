"""Resolved annotations of classes, once for each: resolving compiles all of them."""

from __future__ import annotations

from functools import cache
from typing import Any, get_type_hints


def hints_of(kind: Any) -> dict[str, Any]:
    """The types of a class's fields, by name; not to be changed."""
    return _hints(kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
