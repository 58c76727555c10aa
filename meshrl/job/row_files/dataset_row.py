"""Row of a dataset, with its location."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """Object of plain JSON values."""

    location: str  # file and line, for messages
    value: dict[str, Any]
    json_line: str  # as JSON, without a line break

    @classmethod
    def from_value(cls, location: str, value: dict[str, Any]) -> DatasetRow:
        """Return the row of a value; TypeError or ValueError if that is no JSON."""
        return cls(location, value, json.dumps(value, allow_nan=False, ensure_ascii=False))

    @property
    def identity(self) -> bytes:
        """Bytes that are equal for equal rows, in any notation."""
        text = json.dumps(self.value, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def explain_bad_value(value: dict[str, Any]) -> str:
    """Return why a row is not plain JSON."""
    for column, cell in value.items():
        try:
            json.dumps(cell, allow_nan=False)
        except TypeError as error:
            return f"column {column!r} is not plain data ({error})"
        except ValueError:
            return f"column {column!r} contains a number that is not finite"
    return "the row is not plain data"
