"""What a call came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: str  # of common.api.sandbox
    value: Any
    error: str
