"""Trajectories of `loadtests.ledger`: their lengths, their turns' lengths, and tool outputs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SLOTS = 32  # of an engine
RATE = 40.0  # tokens/s of each request
VOCABULARY = 151_936  # Qwen's, so that ids are as wide as they are in use
STOP = 2
MAX_TOKENS = 16_384
LENGTH_MEDIAN, LENGTH_SIGMA = 200.0, 0.8  # tokens of a turn: mean 275, 1 % above 1,280
PROMPT_TOKENS = 200
TURNS = 4.0  # mean; geometric
TOOL_S = 0.1  # mean; exponential
ANSWER_TOKENS = 40
TOKEN_CHARACTERS = 4  # of English

GREEDY_PROMPT, GREEDY_NEW = 24, 600  # tokens of each trajectory while engines are killed
GREEDY_PROMPTS = 256
GREEDY_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Plan:
    prompt: NDArray[np.int32]
    turns: int


class Traffic:
    """Plans of trajectories, tools' answers, and prose as long as a turn."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        draw = np.random.default_rng(seed)
        self._words = draw.integers(3, VOCABULARY, 1 << 16).astype(np.int32)
        root = Path(__file__).parents[2]
        self._prose = " ".join(p.read_text() for p in sorted((root / "docs").rglob("*.md")))

    def plan(self) -> Plan:
        turns = 1
        while self._random.random() > 1 / TURNS:
            turns += 1
        return Plan(self._ids(PROMPT_TOKENS), turns)

    def answer(self) -> list[int]:
        return self._ids(ANSWER_TOKENS).tolist()  # type: ignore[no-any-return]

    def tool_s(self) -> float:
        return self._random.expovariate(1 / TOOL_S)

    def text(self, tokens: int) -> str:
        characters = tokens * TOKEN_CHARACTERS
        start = self._random.randrange(max(1, len(self._prose) - characters))
        return (self._prose[start:] + self._prose)[:characters]

    def _ids(self, count: int) -> NDArray[np.int32]:
        start = self._random.randrange(len(self._words) - count)
        return self._words[start : start + count]


def greedy_prompt(trajectory: int) -> NDArray[np.int32]:
    """Return a prompt; prompts repeat, because each is compared with an undisturbed run."""
    draw = np.random.default_rng(trajectory % GREEDY_PROMPTS)
    return draw.integers(0, GREEDY_VOCABULARY, GREEDY_PROMPT).astype(np.int32)
