"""Checks that the tokenizer writes prompts and answers as they are: all their characters, and no
special token where the job has not chosen that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.chat import ANYWHERE
from meshrl.job.checks.machine.rows import prompts
from meshrl.job.checks.machine.together import raise_all, shown
from meshrl.job.checks.machine.tokens import tokenizer_of
from meshrl.job.loaded import JobFile
from meshrl.job.rows import TimedRows

LOOK_S = 1.0  # for all rows together
SHOWN = 3  # rows, and pieces of a text, that an error names


def written(job: JobFile) -> None:
    """The rows' own prompts and answers, of jobs whose environment is not the author's."""
    if not job.own_prompts:
        return
    texts = Texts(job)
    for key, row in TimedRows(job.datasets, LOOK_S):
        texts.look(key, row.place, prompts.texts_of(job, key, row))
    raise_all(texts.errors())
    texts.tell()


class Texts:
    """The prompts and answers of a job with pieces that the tokenizer does not write."""

    def __init__(self, job: JobFile) -> None:
        self._job = job
        self._lost: dict[str, list[tuple[str, list[str]]]] = {}  # key: (place, pieces)
        self._special: dict[str, list[tuple[str, list[str]]]] = {}

    def look(self, key: str, place: str, texts: Iterable[str]) -> None:
        """Takes in the prompt, and perhaps the answer, of a row of the dataset `key`."""
        try:
            tokenizer = tokenizer_of(self._job)
        except ConfigError:  # said by another check
            return
        prompt, *answers = texts
        said = [prompt, *map(self._without_end, answers)]
        if lost := [piece for text in said for piece in tokenizer.lost(text)]:
            self._lost.setdefault(key, []).append((place, lost))
        if special := [token for text in said for token in tokenizer.quoted_tokens(text)]:
            self._special.setdefault(key, []).append((place, special))

    def errors(self) -> Iterator[ConfigError]:
        for key, found in self._lost.items():
            yield self._job.fail(
                key,
                f"{key}: the tokenizer drops or replaces characters: {_shown(found)}",
                "Keep to characters of its vocabulary, leave these rows out, or take a tokenizer "
                "that falls back on bytes",
            )
        environment = self._job.config.environment
        if environment.chat or environment.special_tokens:
            return
        for key, found in self._special.items():
            yield self._job.fail(
                key,
                f"{key}: texts hold special tokens, and the job has no chat format: "
                f"{_shown(found)}",
                'Set environment.special_tokens: "anywhere" encodes them as tokens, as for prompts '
                'that were rendered beforehand, "template" as text; or set environment.chat',
            )

    def tell(self) -> None:
        if self._job.config.environment.special_tokens == ANYWHERE:
            return
        for key, found in self._special.items():
            print(
                f"{key}: special tokens in texts are encoded as text: {_shown(found)}",
                file=sys.stderr,
            )

    def _without_end(self, answer: str) -> str:
        """The answer without the token that ends it."""
        if self._job.config.environment.chat:
            return answer
        ends = (end for end in self._job.config.rollout.stop if answer.endswith(end))
        return answer.removesuffix(max(ends, key=len, default=""))


def _shown(found: list[tuple[str, list[str]]]) -> str:
    places = [
        f"{place}: {', '.join(map(repr, list(dict.fromkeys(pieces))[:SHOWN]))}"
        for place, pieces in found
    ]
    return shown(places, SHOWN, "; and {} more rows")
