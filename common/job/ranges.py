"""Ranges of values in type hints: those of annotated-types, a dependency of pydantic.

Pydantic alone reads them. A process on a host without pydantic validates no job, so there the names
stand for nothing (`loadtests.gpu`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Ge", "Gt", "Interval", "Le", "MinLen", "Predicate"]

if TYPE_CHECKING:
    from annotated_types import Ge, Gt, Interval, Le, MinLen, Predicate
else:
    try:
        from annotated_types import Ge, Gt, Interval, Le, MinLen, Predicate
    except ModuleNotFoundError:

        class _UnreadRange:
            def __init__(self, *_: Any, **__: Any) -> None: ...

        Ge = Gt = Interval = Le = MinLen = Predicate = _UnreadRange
