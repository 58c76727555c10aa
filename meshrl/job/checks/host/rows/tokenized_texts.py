"""Checks that the tokenizer preserves prompts and answers.

All characters must remain, and no special token may appear unless the job allows that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.chat.chat_format import SPECIAL_TOKENS_ANYWHERE
from meshrl.job.checks.host.error_texts import join_first, raise_combined
from meshrl.job.checks.host.rows import prompt_lengths
from meshrl.job.checks.host.tokens import load_job_tokenizer
from meshrl.job.dataset_rows import TimedRows
from meshrl.job.job_file import JobFile

TIME_LIMIT_S = 1.0  # for all rows together
SHOWN_ROWS = 3  # rows, and pieces of a text, that an error names


def check_texts(job: JobFile) -> None:
    """Check the rows' own prompts and answers, unless the environment is the author's."""
    if not job.uses_row_prompts:
        return
    texts = TextProblems(job)
    for key, row in TimedRows(job.datasets, TIME_LIMIT_S):
        texts.add_row(key, row.location, prompt_lengths.extract_texts(job, key, row))
    raise_combined(texts.make_errors())
    texts.print_notices()


class TextProblems:
    """Prompts and answers of a job with pieces that the tokenizer loses."""

    def __init__(self, job: JobFile) -> None:
        self._job = job
        self._lost_pieces: dict[str, list[tuple[str, list[str]]]] = {}  # key: (place, pieces)
        self._special_tokens: dict[str, list[tuple[str, list[str]]]] = {}

    def add_row(self, key: str, location: str, texts: Iterable[str]) -> None:
        """Add the prompt, and perhaps the answer, of a row of the dataset `key`."""
        try:
            tokenizer = load_job_tokenizer(self._job)
        except ConfigError:  # reported by another check
            return
        prompt, *answers = texts
        row_texts = [prompt, *map(self._strip_end_token, answers)]
        if lossy_pieces := [
            piece for text in row_texts for piece in tokenizer.find_lossy_pieces(text)
        ]:
            self._lost_pieces.setdefault(key, []).append((location, lossy_pieces))
        if special := [
            token for text in row_texts for token in tokenizer.find_special_tokens(text)
        ]:
            self._special_tokens.setdefault(key, []).append((location, special))

    def make_errors(self) -> Iterator[ConfigError]:
        for key, found in self._lost_pieces.items():
            yield self._job.make_error(
                key,
                f"{key}: the tokenizer drops or replaces characters: {_format_rows(found)}",
                "Use only characters of its vocabulary, remove these rows, or use a "
                "tokenizer with byte fallback",
            )
        environment = self._job.config.environment
        if environment.chat or environment.special_tokens:
            return
        for key, found in self._special_tokens.items():
            yield self._job.make_error(
                key,
                f"{key}: texts contain special tokens, but the job has no chat format: "
                f"{_format_rows(found)}",
                'Set environment.special_tokens: "anywhere" encodes them as tokens, for '
                'prompts rendered beforehand, and "template" as text; or set '
                "environment.chat",
            )

    def print_notices(self) -> None:
        if self._job.config.environment.special_tokens == SPECIAL_TOKENS_ANYWHERE:
            return
        for key, found in self._special_tokens.items():
            print(
                f"{key}: special tokens in texts are encoded as text: {_format_rows(found)}",
                file=sys.stderr,
            )

    def _strip_end_token(self, answer: str) -> str:
        """Return the answer without the token that ends it."""
        if self._job.config.environment.chat:
            return answer
        ends = (end for end in self._job.config.rollout.stop if answer.endswith(end))
        return answer.removesuffix(max(ends, key=len, default=""))


def _format_rows(found: list[tuple[str, list[str]]]) -> str:
    places = [
        f"{place}: {', '.join(map(repr, list(dict.fromkeys(pieces))[:SHOWN_ROWS]))}"
        for place, pieces in found
    ]
    return join_first(places, SHOWN_ROWS, "; and {} more rows")
