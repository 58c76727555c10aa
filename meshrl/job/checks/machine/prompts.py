"""Checks that prompts leave room for a turn, and can be written in the model's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model.tokenizer import Tokenizer
from meshrl.job import rows
from meshrl.job.checks.machine.tokens import tokenizer_of
from meshrl.job.jobfile import JobFile, at

LOOK_S = 1.5  # for all rows together: the longest ones come first, and the rest as far as it lasts
SHOWN = 3  # rows that an error names


def lengths(job: JobFile) -> None:
    """The rows' own prompts, of jobs whose environment is not the author's, and answers of sft.

    Of a chat only the messages' texts are counted: what the format adds comes on top.
    """
    config = job.config
    if config.environment.use or config.environment.verifiers:
        return
    tokenizer, room = tokenizer_of(job), config.rollout.max_tokens
    until = time.monotonic() + LOOK_S
    for key, path in datasets(job):
        answer = config.dataset.response if config.supervised and key == "dataset.train" else ""
        read = list(texts_of(path, config.dataset.prompt, answer, until))
        read.sort(key=lambda entry: -sum(map(len, entry[1])))
        long: list[tuple[str, int]] = []
        for place, texts in read:
            if time.monotonic() > until:
                break
            counts = [
                count_tokens(job, key, place, text, tokenizer, begins=i == 0)
                for i, text in enumerate(texts)
            ]
            if not counts[0]:
                raise job.fail(key, f"{place}: the prompt is empty", "Leave the row out")
            count = sum(counts)
            if count + (not answer) > room:
                long.append((place, count))
        refuse_long(job, key, long, "prompt and answer have" if answer else "the prompt has")


def refuse_long(job: JobFile, key: str, long: list[tuple[str, int]], what: str) -> None:
    """Raises when there are prompts, (place, tokens), that are too long."""
    if not long:
        return
    shown = ", ".join(f"{place} ({count} tokens)" for place, count in long[:SHOWN])
    more = f" and {len(long) - SHOWN} more rows" if len(long) > SHOWN else ""
    raise job.fail(
        key,
        f"{key}: {what} no room in rollout.max_tokens = {job.config.rollout.max_tokens}: "
        f"{shown}{more}",
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


def datasets(job: JobFile) -> Iterator[tuple[str, Path]]:
    """The key and path of each dataset."""
    for key in ("dataset.train", "dataset.held_out"):
        if name := at(job.config, key):
            yield key, Path(name)
    for i, dataset in enumerate(job.config.evaluation.datasets):
        yield f"evaluation.datasets[{i}].path", Path(dataset.path)


def texts_of(path: Path, prompt: str, answer: str, until: float) -> Iterator[tuple[str, list[str]]]:
    """(place, what is to be encoded) of the rows that are read in time."""
    keys = [prompt, answer] if answer else [prompt]
    for row in rows.read(path):
        yield row.place, [said(row.value.get(key)) for key in keys]
        if time.monotonic() > until:
            return


def said(value: Any) -> str:
    """The text of a prompt, of messages all that they say."""
    if isinstance(value, list):
        return "".join(said(message) for message in value)
    if isinstance(value, dict):  # a message, or a part of one
        return said(value.get("content", value.get("text")))
    return value if isinstance(value, str) else ""
