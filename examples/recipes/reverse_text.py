"""Taskset of the verifiers package: reverse a sentence, letter by letter.

The score is the similarity of the answer and the reversed sentence, from 0 to 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

__all__ = ["ReverseText"]

WORDS = [
    "the",
    "a",
    "small",
    "old",
    "red",
    "quiet",
    "river",
    "house",
    "train",
    "garden",
    "opens",
    "stops",
    "waits",
    "near",
    "behind",
]
SYSTEM = "Reverse the text letter by letter. Answer with the reversed text alone."


class SentenceData(vf.TaskData):
    answer: str


class Sentence(vf.Task[SentenceData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        last = trace.branches[-1].messages[-1]
        text = (last.content or "").strip() if last.role == "assistant" else ""
        return SequenceMatcher(None, text, self.data.answer).ratio()


class ReverseText(vf.Taskset[Sentence, vf.TasksetConfig]):
    def load(self) -> Iterator[Sentence]:
        draws = random.Random(0)
        texts = {" ".join(draws.choices(WORDS, k=draws.randint(3, 8))) for _ in range(1200)}
        for text in sorted(texts):
            data = SentenceData(prompt=text, answer=text[::-1], system_prompt=SYSTEM)
            yield Sentence(data, self.config.task)
