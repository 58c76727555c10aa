"""Measures how fast known tokens are computed, and so what recomputing a cache would take."""

from __future__ import annotations

HALF_LIFE = (
    8192  # tokens after which what was measured counts half: engines warm up and contexts grow
)


class PrefillRate:
    """A running average over steps in which stretches of known tokens were computed."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Known tokens computed in a second; 0: nothing is measured yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """A step of `rows` tokens, `tokens` of them in stretches. The time is shared out evenly: a
        token is a row, whether it was known or is decoded."""
        if not seconds:
            return  # less than the clock can tell
        fade = 0.5 ** (tokens / HALF_LIFE)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds * tokens / rows
