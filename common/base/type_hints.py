"""Resolved annotations of classes, once for each: resolving compiles all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, get_type_hints

# The types of a class's fields, by name; not to be changed.
resolve_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
