"""The answer to one sandbox call: a status, a value, an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: str  # a status of common.api.sandbox
    value: Any
    error: str
