"""Checks that prompts leave space for a turn, and can be written in the model's tokens."""

from __future__ import annotations

import time

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import find_value
from meshrl.common.model.chat.demonstrations import MESSAGES_KEY, is_demonstration
from meshrl.common.model.chat.messages import add_system_prompt, extract_text
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
    """Check the rows' own prompts, unless the environment is the author's or the row is learned.

    Of a chat only the messages' texts are counted: the format's tokens come on top.
    """
    if not job.uses_row_prompts:
        return
    tokenizer = load_job_tokenizer(job)
    until = time.monotonic() + TIME_LIMIT_S
    read: dict[str, list[tuple[str, str]]] = {s.key: [] for s in job.scored_datasets}
    for key, row in dataset_rows.TimedRows(job.scored_datasets, TIME_LIMIT_S / 2):
        read[key].append((row.location, extract_texts(job, key, row)[0]))
    for key, found in read.items():
        found.sort(key=lambda entry: -len(entry[1]))
        long: list[tuple[str, int]] = []
        room = find_limit(job, key)[1]
        for place, text in found:
            if time.monotonic() > until:
                break
            count = count_tokens(job, key, place, text, tokenizer)
            if not count:
                raise job.make_error(key, f"{place}: the prompt is empty", "Remove the row")
            if count + 1 > room:
                long.append((place, count))
        raise_too_long(job, key, long)


def raise_too_long(job: JobFile, key: str, long: list[tuple[str, int]]) -> None:
    """Raise an error when there are prompts, (place, tokens), that are too long."""
    if not long:
        return
    places = [f"{place} ({count} tokens)" for place, count in long]
    limit_key, room = find_limit(job, key)
    raise job.make_error(
        key,
        f"{key}: the prompt does not fit in {limit_key} = {room}: "
        + join_first(places, SHOWN_ROWS, " and {} more rows", ", "),
        f"Raise {limit_key}, which counts prompt and answer together, or remove these rows",
    )


def find_limit(job: JobFile, key: str) -> tuple[str, int]:
    """Return the key and the value of the longest trajectory from rows of the dataset `key`."""
    evaluation = job.config.evaluation
    limits = {f"evaluation.datasets[{i}]": d.max_tokens for i, d in enumerate(evaluation.datasets)}
    table = "evaluation" if key == "dataset.held_out" else key.removesuffix(".path")
    own = (limits | {"evaluation": evaluation.max_tokens}).get(table, 0)
    return (
        (f"{table}.max_tokens", own)
        if own
        else ("rollout.max_tokens", job.config.rollout.max_tokens)
    )


def count_tokens(job: JobFile, key: str, location: str, prompt: str, tokenizer: Tokenizer) -> int:
    """Count the tokens of a prompt.

    Raises ConfigError with its place when the vocabulary cannot express it.
    """
    try:
        return len(tokenizer.encode_start(prompt))
    except ConfigError as error:
        raise job.make_error(key, f"{location}: {error.message}", error.fix) from error


def extract_texts(job: JobFile, key: str, row: DatasetRow) -> list[str]:
    """Return the prompt, and perhaps the answer, of a row of the dataset `key`.

    A conversation to learn is one text.
    """
    dataset = job.config.dataset
    answer = find_value(row.value, dataset.response)
    if job.is_supervised(key) and is_demonstration(row.value, answer):
        return [extract_text(row.value[MESSAGES_KEY])]
    prompt = add_system_prompt(find_value(row.value, dataset.prompt), dataset.system)
    return list(map(extract_text, [prompt, answer] if job.is_supervised(key) else [prompt]))
