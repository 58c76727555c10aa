"""The types of a job file's values, with their ranges; `meshrl.common.job.config` declares its keys
by them.

Nothing is checked here. `meshrl.common.job.schema` has pydantic hold a job file to them; services
read jobs that were checked when they were submitted, and never import pydantic.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, MinLen, Predicate

MAX_INTEGER = 2**63 - 1  # whole number that messages carry


class ConfigTable:
    """A table of a job file: it has no other keys, and no value is converted to another type."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {"strict": False}  # a table itself comes as a dict


class NestedValueError(ValueError):
    """A value inside of a table does not fit; `place` says where in it."""

    def __init__(self, subkey: str, message: str) -> None:
        super().__init__(message)
        self.subkey = subkey


def _is_name(text: str) -> bool:
    """True; ValueError says what a name is made of."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise ValueError("must be letters, digits, '.', '_', '-', and not begin with a mark")
    return True


def _is_figure(text: str) -> bool:
    """True; ValueError says what the names of figures are made of: a dot follows them."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise ValueError("must be letters, digits, '_', '-'")
    return True


def _is_path(text: str) -> bool:
    """True; ValueError when no file can be called that."""
    if "\0" in text:
        raise ValueError("holds a zero byte, which no path does")
    if text.startswith("~") and os.path.expanduser(text) == text:
        raise ValueError("begins with the home directory of a user that this host has not")
    return True


def _is_endpoint(text: str) -> bool:
    """True; ValueError says what processes can listen at."""
    found = re.fullmatch(r"tcp://[^\s/]+:(\*|\d{1,5})", text)
    if not found or (found[1] != "*" and int(found[1]) > 65535):
        raise ValueError("must be tcp://INTERFACE:PORT, with * for any free port")
    return True


def _is_plain(table: dict[str, Any]) -> bool:
    """True; Misfit names a value that cannot be written as JSON and be sent."""
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
OptionsTable = Annotated[dict[str, Any], Predicate(_is_plain)]

Dtype = Literal["float32", "bfloat16"]
EngineBackend = Literal["auto", "native", "eager", "graphs"]
AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo", "sft", "distill"
]
