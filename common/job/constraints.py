"""Types of a job file's values, with their ranges, for the keys in `meshrl.common.job.config`.

This module checks nothing. `meshrl.common.job.schema` validates a job file with pydantic; services
read jobs that were validated at their submission, and never import pydantic.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from meshrl.common.job.cache_memory import parse_cache_memory
from meshrl.common.job.ranges import Ge, Gt, Interval, MinLen, Predicate

MAX_INTEGER = 2**63 - 1  # of messages


class ConfigTable:
    """Table of a job file: unknown keys are errors, and values are not converted to another
    type.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {"strict": False}  # a table itself is a dict


class NestedValueError(ValueError):
    """Error of a value inside a table; `subkey` is its key there."""

    def __init__(self, subkey: str, message: str) -> None:
        super().__init__(message)
        self.subkey = subkey


def _is_name(text: str) -> bool:
    """Return True for a valid name; ValueError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise ValueError(
            "must have only letters, digits, '.', '_' and '-', and begin with a letter or digit"
        )
    return True


def _is_figure(text: str) -> bool:
    """Return True for a valid figure name, which a dot may follow; ValueError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise ValueError("must have only letters, digits, '_' and '-'")
    return True


def _is_path(text: str) -> bool:
    """Return True for a possible path; ValueError otherwise."""
    if "\0" in text:
        raise ValueError("contains a zero byte, which paths cannot contain")
    if text.startswith("~") and os.path.expanduser(text) == text:
        raise ValueError(
            "begins with the home directory of a user that does not exist on this host"
        )
    return True


def _is_endpoint(text: str) -> bool:
    """Return True for an endpoint that a process can listen at; ValueError otherwise."""
    found = re.fullmatch(r"tcp://[^\s/]+:(\*|\d{1,5})", text)
    if not found or (found[1] != "*" and int(found[1]) > 65535):
        raise ValueError("must be tcp://INTERFACE:PORT, with * for any free port")
    return True


def _is_cache_memory(value: float | str) -> bool:
    """Return True for a valid memory of a cache; ValueError otherwise."""
    parse_cache_memory(value)
    return True


def _is_plain(table: dict[str, Any]) -> bool:
    """Return True if all values can be written as JSON and sent; NestedValueError otherwise."""
    pending = list(table.items())
    for place, value in pending:
        if isinstance(value, dict):
            pending += [(f"{place}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(f"{place}[{i}]", inner) for i, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise NestedValueError(place, f"must be a finite number, not {value}")
        elif isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise NestedValueError(place, "must be a number of at most 64 bits")
        elif not isinstance(value, str | int | float):
            raise NestedValueError(place, f"must not be a {type(value).__name__}: write it as text")
    return True


Integer = Annotated[int, Interval(ge=-MAX_INTEGER, le=MAX_INTEGER)]
NonNegativeInteger = Annotated[int, Interval(ge=0, le=MAX_INTEGER)]
PositiveInteger = Annotated[int, Interval(ge=1, le=MAX_INTEGER)]
PositiveNumber = Annotated[float, Gt(0)]
NonNegativeNumber = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]

NonEmptyText = Annotated[str, MinLen(1)]
JobName = Annotated[str, Predicate(_is_name)]
EndpointText = Annotated[str, Predicate(_is_endpoint)]
FigureName = Annotated[str, Predicate(_is_figure)]
FilePath = Annotated[str, Predicate(_is_path)]
CacheMemoryValue = Annotated[float | str, Predicate(_is_cache_memory)]
OptionsTable = Annotated[dict[str, Any], Predicate(_is_plain)]

Dtype = Literal["float32", "bfloat16"]
EngineBackend = Literal["auto", "native", "eager", "graphs"]
AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo", "sft", "distill"
]
