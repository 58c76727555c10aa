"""Checks that prompts leave room for a turn, and can be written in the model's tokens."""

from __future__ import annotations

import time
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import rows
from meshrl.job.checks.machine.together import shown
from meshrl.job.checks.machine.tokens import tokenizer_of
from meshrl.job.loaded import JobFile

LOOK_S = 1.5  # for all rows together: the longest ones come first, and the rest as far as it lasts
SHOWN = 3  # rows that an error names


def lengths(job: JobFile) -> None:
    """The rows' own prompts, of jobs whose environment is not the author's, and answers of sft.

    Of a chat only the messages' texts are counted: what the format adds comes on top.
    """
    config = job.config
    if not job.own_prompts:
        return
    tokenizer, room = tokenizer_of(job), config.rollout.max_tokens
    until = time.monotonic() + LOOK_S
    read: dict[str, list[tuple[str, list[str]]]] = {key: [] for key, _ in job.datasets}
    for key, row in rows.TimedRows(job.datasets, LOOK_S / 2):
        read[key].append((row.place, texts_of(job, key, row)))
    for key, found in read.items():
        found.sort(key=lambda entry: -sum(map(len, entry[1])))
        long: list[tuple[str, int]] = []
        for place, texts in found:
            if time.monotonic() > until:
                break
            counts = [
                count_tokens(job, key, place, text, tokenizer, begins=i == 0)
                for i, text in enumerate(texts)
            ]
            if not counts[0]:
                raise job.fail(key, f"{place}: the prompt is empty", "Leave the row out")
            count = sum(counts)
            if count + (not job.learns(key)) > room:
                long.append((place, count))
        what = "prompt and answer have" if job.learns(key) else "the prompt has"
        refuse_long(job, key, long, what)


def refuse_long(job: JobFile, key: str, long: list[tuple[str, int]], what: str) -> None:
    """Raises when there are prompts, (place, tokens), that are too long."""
    if not long:
        return
    places = [f"{place} ({count} tokens)" for place, count in long]
    raise job.fail(
        key,
        f"{key}: {what} no room in rollout.max_tokens = {job.config.rollout.max_tokens}: "
        + shown(places, SHOWN, " and {} more rows", ", "),
        "Raise rollout.max_tokens, which counts prompt and answer together, or leave these rows "
        "out",
    )


def count_tokens(
    job: JobFile, key: str, place: str, text: str, tokenizer: Tokenizer, begins: bool = True
) -> int:
    """The tokens of a text, which a trajectory begins with or not; ConfigError with its place when
    the vocabulary cannot express it.
    """
    try:
        return len(tokenizer.begin(text) if begins else tokenizer.encode(text))
    except ConfigError as error:
        raise job.fail(key, f"{place}: {error.message}", error.fix) from error


def texts_of(job: JobFile, key: str, row: rows.DatasetRow) -> list[str]:
    """The prompt, and perhaps the answer, of a row of the dataset `key`."""
    dataset = job.config.dataset
    keys = [dataset.prompt, dataset.response] if job.learns(key) else [dataset.prompt]
    return [said(row.value.get(key)) for key in keys]


def said(value: Any) -> str:
    """The text of a prompt, of messages all that they say."""
    if isinstance(value, list):
        return "".join(said(message) for message in value)
    if isinstance(value, dict):  # a message, or a part of one
        return said(value.get("content", value.get("text")))
    return value if isinstance(value, str) else ""
