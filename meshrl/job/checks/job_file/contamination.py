"""Search for evaluation rows that are also trained on."""

from __future__ import annotations

import hashlib
import sys
import unicodedata
from itertools import takewhile
from typing import Any

from meshrl.common.grading.row_values import find_value
from meshrl.common.model.chat.demonstrations import MESSAGES_KEY
from meshrl.common.model.chat.messages import extract_text
from meshrl.job import dataset_rows
from meshrl.job.job_file import JobFile
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.dataset_row import DatasetRow

MAX_SHOWN_CHARS = 60  # characters of a prompt in an error


class OverlapFinder:
    """Finder of evaluation rows with a prompt of a training row.

    Prompts are compared without regard to case, white space and Unicode's forms of a character.
    Where an environment makes the prompts, whole rows are compared.
    """

    def __init__(self, job: JobFile) -> None:
        self._job = job
        self._trained: set[bytes] = set()
        self._found: list[DatasetRow] = []

    def add_trained(self, row: DatasetRow) -> None:
        """Add a training row."""
        self._trained.add(self._identify(row))

    def add_evaluated(self, row: DatasetRow) -> None:
        """Compare a row of the present evaluation set with the training rows."""
        if self._identify(row) in self._trained:
            self._found.append(row)

    def report_found(self, key: str, trained: list[DataSource]) -> None:
        """Name evaluation rows of the set `key` that are trained on, and the trained rows.

        Raises ConfigError unless the job allows them; then a notice is printed.
        """
        if not self._found:
            return
        first, *others = self._found
        identity = self._identify(first)
        every = (row for source in trained for row in dataset_rows.read_rows(source))
        other = next(row for row in every if self._identify(row) == identity)
        also = "; so is one more row" if others else ""
        also = f"; so are {len(others)} more rows" if len(others) > 1 else also
        whole = not self._job.uses_row_prompts
        prompt = "" if whole else ": its prompt"
        shown = "" if whole else f": {self._normalize_prompt(first):.{MAX_SHOWN_CHARS}}"
        text = (
            f"{first.location}{prompt} is also in {_name_trained(trained)} "
            f"({other.location}){shown}{also}"
        )
        if self._job.config.dataset.overlap == "report":
            print(f"notice: {text}", file=sys.stderr)
            return
        raise self._job.make_error(
            key,
            text,
            "Remove these rows from one of the two, since an evaluation of trained rows measures "
            'memory, or set dataset.overlap = "report"',
        )

    def _identify(self, row: DatasetRow) -> bytes:
        text = self._normalize_prompt(row) if self._job.uses_row_prompts else ""
        if not text:
            return row.identity
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()

    def _normalize_prompt(self, row: DatasetRow) -> str:
        prompt = find_value(row.value, self._job.config.dataset.prompt)
        if prompt is None and isinstance(messages := row.value.get(MESSAGES_KEY), list):
            prompt = list(takewhile(lambda message: not _is_learned(message), messages))
        text = extract_text(prompt)
        return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _name_trained(trained: list[DataSource]) -> str:
    return "dataset.mix" if trained[0].key.startswith("dataset.mix") else trained[0].key


def _is_learned(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"
