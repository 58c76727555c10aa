"""Reader of a job's rows, with checks before a mesh starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import find_value, format_keys, get_value
from meshrl.common.model.chat.messages import ROLES, parse_conversation
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.dataset_row import DatasetRow
from meshrl.job.row_files.file_locations import find_files

CONVERSATION_KEYS = ("messages", "conversation", "conversations")
SHAREGPT_FIX = (
    "Write each message as {'role', 'content'}: 'human' is the role 'user', and 'gpt' is "
    "'assistant'"
)


def read_rows(
    source: DataSource, prompt_key: str = "", *, chat: bool = False
) -> Iterator[DatasetRow]:
    """Yield the rows of a source: the only function that loads rows, from any format and place.

    Blank lines are left out, and the keys of `source.columns` are added. Files of the Hub are
    fetched into its cache first.

    Raises ConfigError with the place of a row that is no object of plain JSON values, that cannot
    be sent, that lacks a column, or whose `prompt_key` is no string (with `chat`: no string and no
    list of messages). `where` of the error may be the job key of a wrong option.
    """
    for file in find_files(source):
        for row in file.read():
            if source.columns:
                row = _add_columns(row, source)
            check_sendable(row.location, row.value)
            if prompt_key:
                check_prompt(row, prompt_key, chat)
            yield row


def _add_columns(row: DatasetRow, source: DataSource) -> DatasetRow:
    """Return the row with the keys of the source's column map."""
    value = dict(row.value)
    for column, key in source.columns.items():
        try:
            value[column] = get_value(row.value, key)
        except KeyError:
            is_prompt = column == source.prompt_column
            option = source.get_option_key("prompt" if is_prompt else "columns")
            raise ConfigError(
                f"{row.location}: the row has no {key!r}, which {option} names; it has "
                f"{format_keys(row.value)}",
                where=option,
                fix=f"Set {option if is_prompt else f'{option}.{column}'} to a key of the rows",
            ) from None
    return DatasetRow.from_value(row.location, value)


class TimedRows:
    """Rows of several datasets, which share a time limit in equal parts."""

    def __init__(self, sources: Sequence[DataSource], time_limit_s: float) -> None:
        self._sources, self._time_limit_s = sources, time_limit_s
        self.is_partial = False  # there were more rows than time

    def __iter__(self) -> Iterator[tuple[str, DatasetRow]]:
        """Yield (key of the dataset, row)."""
        until = time.monotonic()
        for source in self._sources:
            until += self._time_limit_s / len(self._sources)
            for number, row in enumerate(read_rows(source)):
                if number and time.monotonic() > until:
                    self.is_partial = True
                    break
                yield source.key, row


def check_prompt(row: DatasetRow, prompt_key: str, chat: bool) -> None:
    """Raise ConfigError unless the row's prompt is a text or, with `chat`, messages."""
    value = find_value(row.value, prompt_key)
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        kinds = "string, or list of messages," if chat else "string"
        raise ConfigError(
            f"{row.location}: the row has no {kinds} {prompt_key!r}"
            + (f", but {value!r:.60}" if value is not None else ""),
            fix=_suggest_prompt(row, chat),
        )
    if not chat:
        raise ConfigError(
            f"{row.location}: {prompt_key!r} is a list, perhaps of messages, but the job has "
            "no chat format",
            fix='Set environment.chat, such as "auto", or write the prompt as a text',
        )
    try:
        parse_conversation(value, ROLES)
    except ValueError as error:
        raise ConfigError(
            f"{row.location}: {prompt_key!r} is not a conversation: {error}",
            fix=SHAREGPT_FIX
            if is_sharegpt(value)
            else "Write each message as {'role', 'content'}, where the content is a text or "
            "parts of type 'text'",
        ) from error


def _suggest_prompt(row: DatasetRow, chat: bool) -> str:
    """Return what to do about a row without a prompt, from the form of the row."""
    for key, value in row.value.items():
        if is_sharegpt(value):
            return f"{key!r} has ShareGPT's form. {SHAREGPT_FIX}"
        if key in CONVERSATION_KEYS and isinstance(value, list):
            more = "" if chat else ', and environment.chat to a format such as "auto"'
            return f"Set dataset.prompt to {key!r}{more}"
    has = f"the row has {format_keys(row.value)}"
    if ".csv" in row.location:
        has += ", which the first line of the file names"
    return f"Set dataset.prompt to the key of the prompt in the rows; {has}"


def is_sharegpt(value: Any) -> bool:
    """Return True for messages with the keys `from` and `value`."""
    return isinstance(value, list) and any(
        isinstance(message, dict) and {"from", "value"} <= message.keys() for message in value
    )


def check_sendable(location: str, value: dict[str, Any]) -> None:
    """Raise ConfigError unless a row can be sent to the process that will work on it."""
    if not (problem := _explain_unsendable(value)):
        return
    culprits = (f"column {k!r}" for k, cell in value.items() if _explain_unsendable({k: cell}))
    raise ConfigError(
        f"{location}: {next(culprits, 'the row')} cannot be sent ({problem})",
        fix="Use only UTF-8 text, 64-bit integers, and shallow lists and tables; tests of "
        "code may be JSON text, which represents any integer",
    )


def _explain_unsendable(value: dict[str, Any]) -> str:
    try:
        msgpack.packb(value)
    except (OverflowError, ValueError) as error:
        return str(error)
    return ""
