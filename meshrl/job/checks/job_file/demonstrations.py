"""Checks of the rows of a supervised job: each has an answer, or a conversation to learn."""

from __future__ import annotations

from typing import Any

from meshrl.common.grading.row_values import find_value, format_keys
from meshrl.common.model.chat.demonstrations import (
    MESSAGES_KEY,
    TOOLS_KEY,
    is_demonstration,
    parse_demonstration,
)
from meshrl.common.model.chat.messages import parse_message
from meshrl.job.dataset_rows import SHAREGPT_FIX, check_prompt, is_sharegpt
from meshrl.job.job_file import HELD_OUT_KEY, JobFile
from meshrl.job.row_files.dataset_row import DatasetRow

PREFERENCE_KEYS = {"chosen", "rejected"}
PREFERENCE_FIX = (
    "Learn the preferred answers: set dataset.{}. Or train with a reward by another algorithm, or "
    "learn from pairs with TRL's DPOTrainer"
)


TOOLS_FIX = f"Write {TOOLS_KEY!r} as a list of JSON schemas of functions, or as its JSON text"


def check_supervised_row(job: JobFile, key: str, row: DatasetRow) -> None:
    """Check the form of a row that is learned, or whose loss is an evaluation.

    Rows without an answer, or with one that is too long, are counted later and left out.
    """
    config, value = job.config, row.value
    answer = find_value(value, config.dataset.response)
    if is_demonstration(value, answer) and job.uses_row_prompts:
        _check_demonstration(job, key, row)
        return
    if answer is None and value.keys() >= PREFERENCE_KEYS:
        wrong = f"{row.location}: the row has a preference pair, 'chosen' and 'rejected'"
        is_conversation = isinstance(value["chosen"], list)
        chosen = f"columns.{MESSAGES_KEY}" if is_conversation else "response"
        fix = PREFERENCE_FIX.format(f"{chosen} = 'chosen'")
        raise job.make_error(key, f"{wrong}, which no algorithm learns", fix)
    if job.uses_row_prompts:
        if find_value(value, config.dataset.prompt) is None:
            wrong = f"{row.location}: the row has neither {config.dataset.prompt!r}, a prompt, nor"
            wrong += f" {MESSAGES_KEY!r}, a conversation; it has {format_keys(value)}"
            raise job.make_error(key, wrong, _suggest_keys(value))
        with job.locate_errors(key):
            check_prompt(row, config.dataset.prompt, bool(config.environment.chat))
    if key != HELD_OUT_KEY:
        _check_answer(job, row)


def _suggest_keys(value: dict[str, Any]) -> str:
    """Return what to do about a row without a prompt and without a conversation."""
    for key, item in value.items():
        if is_sharegpt(item):
            return f"{key!r} has ShareGPT's form. {SHAREGPT_FIX}, under {MESSAGES_KEY!r}"
        if isinstance(item, list) and item and isinstance(item[0], dict) and "role" in item[0]:
            return f"Set dataset.columns.{MESSAGES_KEY} = {key!r}"
    return (
        "Set dataset.prompt and dataset.response to the keys of prompt and answer, or "
        f"dataset.columns.{MESSAGES_KEY} to the key of a conversation"
    )


def _check_demonstration(job: JobFile, key: str, row: DatasetRow) -> None:
    if not job.config.environment.chat:
        wrong = f"{row.location}: {MESSAGES_KEY!r} is a conversation, but the job has no chat"
        fix = 'Set environment.chat, such as "auto", or write prompt and answer as texts'
        raise job.make_error("environment.chat", f"{wrong} format", fix)
    try:
        parse_demonstration(row.value)
    except ValueError as error:
        raise job.make_error(
            key,
            f"{row.location}: the conversation is invalid: {error}",
            TOOLS_FIX
            if repr(TOOLS_KEY) in str(error)
            else SHAREGPT_FIX
            if is_sharegpt(row.value[MESSAGES_KEY])
            else "Write each message as {'role', 'content'}, and calls as {'function': {'name', "
            "'arguments'}} in the assistant's 'tool_calls'",
        ) from error


def _check_answer(job: JobFile, row: DatasetRow) -> None:
    """Check that a row has an answer to learn, which may be an empty text."""
    key = job.config.dataset.response
    answer = find_value(row.value, key)
    wrong = fix = ""
    if isinstance(answer, dict) and not job.config.environment.chat:
        wrong = f"{key!r} is a message, but the job has no chat format"
        fix = 'Set environment.chat, such as "auto", or write the answer as a text'
    elif not isinstance(answer, dict | str):
        given = f", but {answer!r:.60}" if answer is not None else ""
        wrong = f"the row has no text {key!r} to train on{given}"
        wrong += f"; it has {format_keys(row.value)}"
        fix = "Set dataset.response to the key of the answer in the rows"
        if job.uses_row_prompts:
            fix += f", or give each row a conversation under {MESSAGES_KEY!r}"
    elif answer and isinstance(answer, dict):
        try:
            parse_message({"role": "assistant"} | answer, "the answer", ("assistant",))
        except ValueError as error:
            wrong = f"{key!r} is not a message of the assistant: {error}"
            fix = "Write it as a text, or as {'role': 'assistant', 'content': text}"
    if wrong:
        raise job.make_error("dataset.response", f"{row.location}: {wrong}", fix)
