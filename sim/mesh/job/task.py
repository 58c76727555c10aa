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


class Talk:
    """A row of a workload: so many turns, each followed by a tool that takes its time."""

    def open(self, row: dict[str, Any]) -> str:
        self._left, self._tool_s = int(row["turns"]), float(row["tool_s"])
        self._alike = bool(row["alike"])
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        waits(self._tool_s)
        self._left -= 1
        return {"append": "+"} if self._left else {"done": True, "reward": self._score(text)}

    def cut(self, text: str) -> float:
        waits(self._tool_s)
        return self._score(text)

    def _score(self, text: str) -> float:
        return 1.0 if self._alike else score(text)

    def close(self) -> None:
        return None


_owed_s = 0.0  # of virtual time, since `owed_s` was asked last


def waits(seconds: float) -> None:
    """The operation that is under way takes so long; no thread waits for it."""
    global _owed_s
    _owed_s += seconds


def owed_s() -> float:
    """What operations have said that they take, since the last question."""
    global _owed_s
    owed, _owed_s = _owed_s, 0.0
    return owed


def score(text: str) -> float:
    return float(zlib.crc32(text.encode()) & 1)
