"""Rows that a supervised job can learn: they are counted before the start, and the bundle has no
others.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import find_value
from meshrl.common.job.config import JobConfig
from meshrl.common.model.chat.chat_format import SPECIAL_TOKENS_ANYWHERE, ChatFormatError
from meshrl.common.model.chat.demonstrations import (
    EncodedPiece,
    encode_demonstration,
    is_demonstration,
    parse_demonstration,
)
from meshrl.common.model.chat.messages import add_system_prompt, parse_conversation, parse_message
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import dataset_rows
from meshrl.job.job_file import HELD_OUT_KEY
from meshrl.job.model_files import load_chat
from meshrl.job.row_files.data_source import DataSource, list_sources
from meshrl.job.row_files.file_locations import find_files

PROGRESS_INTERVAL_S = 5.0
CACHED_COUNTS = 8  # datasets whose rows are counted before the start and then packed
COUNTED_TABLES = ("dataset", "environment", "model", "rollout")  # tables that change the counts
SHOWN_ROWS = 3  # rows that a text names of each kind
NO_ANSWER = "without an answer"


@dataclass
class RowCounts:
    """Rows of one dataset, and the places of those that cannot be learned, by reason."""

    row_count: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)
    unusable: set[int] = field(default_factory=set)  # numbers of rows, from 0
    token_count: int = 0  # tokens of the usable rows
    learned_count: int = 0  # those of them that are learned

    @property
    def usable_count(self) -> int:
        return self.row_count - len(self.unusable)

    def describe(self) -> str:
        """Return the counts as a text, with the first rows of each kind that is left out."""
        kinds = [
            f"{len(places)} {reason} ({'; '.join(places[:SHOWN_ROWS])}"
            + ("; ...)" if len(places) > SHOWN_ROWS else ")")
            for reason, places in self.left_out.items()
        ]
        used = f"{self.usable_count} of {self.row_count} rows are usable"
        if self.usable_count:
            used += f", with {self.token_count:,} tokens, {self.learned_count:,} of them learned"
        return f"{used}. Left out: {', '.join(kinds)}" if kinds else used

    def leave_out(self, place: str, reason: str, detail: str = "") -> None:
        self.unusable.add(self.row_count)
        self.left_out.setdefault(reason, []).append(place + (f": {detail}" if detail else ""))


class RowEncoder:
    """Encoder of supervised rows, equal to that of an environment process without tools."""

    def __init__(self, config: JobConfig) -> None:
        environment, self._dataset = config.environment, config.dataset
        self._ends = config.rollout.stop
        self._tokenizer = Tokenizer.load(config.model.tokenizer_file)
        self._escapes = environment.special_tokens != SPECIAL_TOKENS_ANYWHERE
        self._chat = (
            load_chat(environment, self._tokenizer, self._ends) if environment.chat else None
        )

    def encode(self, row: dict[str, Any]) -> list[EncodedPiece]:
        """Return the pieces of a row; none without an answer. Raises ChatFormatError."""
        dataset, answer = self._dataset, find_value(row, self._dataset.response)
        if self._chat is not None and is_demonstration(row, answer):
            messages, tools = parse_demonstration(row)
            return encode_demonstration(self._chat, messages, tools or [], dataset.train_on)
        prompt = find_value(row, dataset.prompt)
        if not answer or not prompt:
            return []
        if self._chat is None:
            return self._encode_texts(prompt, answer)
        message = answer if isinstance(answer, dict) else {"content": answer}
        messages = parse_conversation(add_system_prompt(prompt, dataset.system))
        turn = parse_message({"role": "assistant"} | message, "the answer", ("assistant",))
        ids = self._chat.start_conversation(messages).ids
        return [(ids, False), (self._chat.encode_answer(messages, turn), True)]

    def _encode_texts(self, prompt: str, answer: str) -> list[EncodedPiece]:
        end = max((e for e in self._ends if answer.endswith(e)), key=len, default="")
        body = answer.removesuffix(end)
        body = self._tokenizer.escape(body) if self._escapes else body
        ids = self._tokenizer.encode_start(prompt, escape=self._escapes)
        return [(ids, False), (self._tokenizer.encode(body + end), True)]


def is_counted(config: JobConfig, key: str) -> bool:
    """Return True for training rows that are learned as they are, without the author's code."""
    is_training = key.startswith("dataset.") and key != HELD_OUT_KEY
    return is_training and config.is_supervised and not config.environment.use


def count_rows(config: JobConfig, source: DataSource) -> RowCounts:
    """Count the rows of a source that can be learned; print the progress of a long count."""
    files = [file.path.stat() for file in find_files(source)]
    document = config.to_document()
    tables = {name: document[name] for name in COUNTED_TABLES}
    state = tuple((file.st_mtime_ns, file.st_size) for file in files)
    return _count_rows(json.dumps(tables), source.key, state)


@functools.lru_cache(CACHED_COUNTS)
def _count_rows(document: str, key: str, _: tuple[tuple[int, int], ...]) -> RowCounts:
    config = JobConfig.from_document(json.loads(document))
    encoder, counts, room = RowEncoder(config), RowCounts(), config.rollout.max_tokens
    reported_s = time.monotonic()
    source = next(source for source in list_sources(config) if source.key == key)
    for row in dataset_rows.read_rows(source):
        try:
            pieces = encoder.encode(row.value)
        except ChatFormatError as error:
            counts.leave_out(row.location, "that the chat format rejects", error.message)
        except ConfigError as error:  # characters that the vocabulary lacks
            raise ConfigError(f"{row.location}: {error.message}", fix=error.fix) from error
        else:
            length = sum(len(ids) for ids, _ in pieces)
            learned = sum(len(ids) for ids, is_learned in pieces if is_learned)
            if not learned:
                counts.leave_out(row.location, NO_ANSWER)
            elif length > room:
                reason = f"longer than rollout.max_tokens = {room}"
                counts.leave_out(row.location, reason, f"{length} tokens")
            else:
                counts.token_count += length
                counts.learned_count += learned
        counts.row_count += 1
        if time.monotonic() - reported_s > PROGRESS_INTERVAL_S:
            reported_s = time.monotonic()
            print(f"{key}: {counts.row_count:,} rows counted so far", file=sys.stderr)
    return counts


def read_usable_lines(config: JobConfig, source: DataSource) -> Iterator[str]:
    """Yield the JSON lines of the rows that can be learned."""
    unusable = count_rows(config, source).unusable
    for number, row in enumerate(dataset_rows.read_rows(source)):
        if number not in unusable:
            yield row.json_line
