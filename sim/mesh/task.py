"""The job's environment: a question, a remark after the first turn, a score by what was said."""

from __future__ import annotations

import zlib
from typing import Any


class Question:
    def open(self, row: dict[str, Any]) -> str:
        self._turns = 0
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        self._turns += 1
        if self._turns == 1:
            return {"append": " go on "}
        return {"done": True, "reward": score(text)}

    def cut(self, text: str) -> float:
        return score(text)

    def close(self) -> None:
        return None


def score(text: str) -> float:
    """0 or 1, by the bytes."""
    return float(zlib.crc32(text.encode()) & 1)
