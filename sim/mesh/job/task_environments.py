"""Environment of the job: a question, a remark after the first turn, and a score of the answers."""

from __future__ import annotations

import zlib
from typing import Any


class QuestionEnvironment:
    def open(self, row: dict[str, Any]) -> str:
        self._turns = 0
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        self._turns += 1
        if self._turns == 1:
            return {"append": " go on "}
        return {"done": True, "reward": score_text(text)}

    def cut(self, text: str) -> float:
        return score_text(text)

    def close(self) -> None:
        return None


class ToolTurnsEnvironment:
    """Environment of a workload's row: a number of turns, each followed by a tool with a
    duration.
    """

    def open(self, row: dict[str, Any]) -> str:
        self._remaining_turns, self._tool_s = int(row["turns"]), float(row["tool_s"])
        self._has_equal_rewards = bool(row["alike"])
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        add_wait(self._tool_s)
        self._remaining_turns -= 1
        return (
            {"append": "+"}
            if self._remaining_turns
            else {"done": True, "reward": self._score(text)}
        )

    def cut(self, text: str) -> float:
        add_wait(self._tool_s)
        return self._score(text)

    def _score(self, text: str) -> float:
        return 1.0 if self._has_equal_rewards else score_text(text)

    def close(self) -> None:
        return None


_pending_wait_s = 0.0  # of virtual time, since the last call of `take_pending_wait_s`


def add_wait(seconds: float) -> None:
    """Add a duration to the current operation, without blocking a thread."""
    global _pending_wait_s
    _pending_wait_s += seconds


def take_pending_wait_s() -> float:
    """Return and reset the duration added by operations since the last call."""
    global _pending_wait_s
    owed, _pending_wait_s = _pending_wait_s, 0.0
    return owed


def score_text(text: str) -> float:
    return float(zlib.crc32(text.encode()) & 1)
