"""Checks that prompts leave space for a turn, and can be written in the model's tokens."""

from __future__ import annotations

import time
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import find_value
from meshrl.common.model.chat.messages import add_system_prompt
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import dataset_rows
from meshrl.job.checks.host.error_texts import join_first
from meshrl.job.checks.host.tokens import load_job_tokenizer
from meshrl.job.job_file import JobFile
from meshrl.job.row_files.dataset_row import DatasetRow

TIME_LIMIT_S = (
    1.5  # for all rows together: the longest ones come first, and the rest as far as it lasts
)
SHOWN_ROWS = 3  # rows that an error names


def check_prompt_lengths(job: JobFile) -> None:
    """Check the rows' own prompts, and the answers of sft, unless the environment is the author's.

    Of a chat only the messages' texts are counted: the format's tokens come on top.
    """
    config = job.config
    if not job.uses_row_prompts:
        return
    tokenizer, room = load_job_tokenizer(job), config.rollout.max_tokens
    until = time.monotonic() + TIME_LIMIT_S
    read: dict[str, list[tuple[str, list[str]]]] = {source.key: [] for source in job.datasets}
    for key, row in dataset_rows.TimedRows(job.datasets, TIME_LIMIT_S / 2):
        read[key].append((row.location, extract_texts(job, key, row)))
    for key, found in read.items():
        found.sort(key=lambda entry: -sum(map(len, entry[1])))
        long: list[tuple[str, int]] = []
        for place, texts in found:
            if time.monotonic() > until:
                break
            counts = [
                count_tokens(job, key, place, text, tokenizer, is_start=i == 0)
                for i, text in enumerate(texts)
            ]
            if not counts[0]:
                raise job.make_error(key, f"{place}: the prompt is empty", "Remove the row")
            count = sum(counts)
            if count + (not job.is_supervised(key)) > room:
                long.append((place, count))
        what = "prompt and answer do" if job.is_supervised(key) else "the prompt does"
        raise_too_long(job, key, long, what)


def raise_too_long(job: JobFile, key: str, long: list[tuple[str, int]], subject: str) -> None:
    """Raise an error when there are prompts, (place, tokens), that are too long."""
    if not long:
        return
    places = [f"{place} ({count} tokens)" for place, count in long]
    raise job.make_error(
        key,
        f"{key}: {subject} not fit in rollout.max_tokens = {job.config.rollout.max_tokens}: "
        + join_first(places, SHOWN_ROWS, " and {} more rows", ", "),
        "Raise rollout.max_tokens, which counts prompt and answer together, or remove these rows",
    )


def count_tokens(
    job: JobFile, key: str, location: str, text: str, tokenizer: Tokenizer, is_start: bool = True
) -> int:
    """Count the tokens of a text, at the start of a trajectory or not.

    Raises ConfigError with its place when the vocabulary cannot express it.
    """
    try:
        return len(tokenizer.encode_start(text) if is_start else tokenizer.encode(text))
    except ConfigError as error:
        raise job.make_error(key, f"{location}: {error.message}", error.fix) from error


def extract_texts(job: JobFile, key: str, row: DatasetRow) -> list[str]:
    """Return the prompt, and perhaps the answer, of a row of the dataset `key`."""
    dataset = job.config.dataset
    keys = [dataset.prompt, dataset.response] if job.is_supervised(key) else [dataset.prompt]
    prompt, *answers = (find_value(row.value, key) for key in keys)
    return list(map(extract_text, [add_system_prompt(prompt, dataset.system), *answers]))


def extract_text(value: Any) -> str:
    """Return the text of a prompt; for messages, all their texts."""
    if isinstance(value, list):
        return "".join(extract_text(message) for message in value)
    if isinstance(value, dict):  # a message, or a part of one
        return extract_text(value.get("content", value.get("text")))
    return value if isinstance(value, str) else ""
