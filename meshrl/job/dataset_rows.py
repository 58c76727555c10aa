"""Reader of dataset files, row by row, with checks before a mesh starts.

JSONL; Parquet, one file, a pattern (`train-*.parquet`) or a directory of them; and the output of
`save_to_disk` of Hugging Face's `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from meshrl.common.base.encoding.finite_json import DECODER, NonFiniteNumber
from meshrl.common.base.errors import ConfigError
from meshrl.common.grading.row_values import find_value, format_keys
from meshrl.common.model.chat.messages import ROLES, parse_conversation


@dataclass(frozen=True, slots=True)
class DatasetRow:
    location: str  # file and line, for messages
    value: dict[str, Any]
    json_line: str  # as JSON, without a line break

    @property
    def identity(self) -> bytes:
        """Bytes that are equal for equal rows, in any notation."""
        text = json.dumps(self.value, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def has_dataset(path: Path) -> bool:
    """Return True if a file exists at a dataset's path, which may be a pattern."""
    return path.exists() or bool(_match_pattern(path))


def read_rows(path: Path, prompt_key: str = "", *, chat: bool = False) -> Iterator[DatasetRow]:
    """Yield the rows of a dataset, without blank lines.

    Raises ConfigError with the place of a row that is no object of plain JSON values, that cannot
    be sent, or whose `prompt_key` is no string (with `chat`: no string and no list of messages).
    """
    for row in _read_any(path):
        check_sendable(row.location, row.value)
        if prompt_key:
            _check_prompt(row, prompt_key, chat)
        yield row


class TimedRows:
    """Rows of several datasets, which share a time limit in equal parts."""

    def __init__(self, datasets: Sequence[tuple[str, Path]], time_limit_s: float) -> None:
        self._datasets, self._time_limit_s = datasets, time_limit_s
        self.is_partial = False  # there were more rows than time

    def __iter__(self) -> Iterator[tuple[str, DatasetRow]]:
        """Yield (key of the dataset, row)."""
        until = time.monotonic()
        for key, path in self._datasets:
            until += self._time_limit_s / len(self._datasets)
            for number, row in enumerate(read_rows(path)):
                if number and time.monotonic() > until:
                    self.is_partial = True
                    break
                yield key, row


def _check_prompt(row: DatasetRow, prompt_key: str, chat: bool) -> None:
    """Raise ConfigError unless the row's prompt is a text or, with `chat`, messages."""
    value = find_value(row.value, prompt_key)
    if isinstance(value, str):
        return
    if not isinstance(value, list):
        kinds = "string, or list of messages," if chat else "string"
        raise ConfigError(
            f"{row.location}: the row has no {kinds} {prompt_key!r}"
            + (f", but {value!r:.60}" if value is not None else ""),
            fix="Set dataset.prompt to the key of the prompt in the rows; the row has "
            f"{format_keys(row.value)}",
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
            fix="Write each message as {'role', 'content'}, where the content is a text or "
            "parts of type 'text'",
        ) from error


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


def _read_any(path: Path) -> Iterator[DatasetRow]:
    if path.is_dir():
        return _read_directory(path)
    if matches := _match_pattern(path):
        return _read_parquet(matches)
    return _read_parquet([path]) if path.suffix == ".parquet" else _read_jsonl(path)


def _match_pattern(path: Path) -> list[Path]:
    return sorted(path.parent.glob(path.name)) if "*" in path.name else []


def _read_jsonl(path: Path) -> Iterator[DatasetRow]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            place = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value = DECODER.decode(line) if line else None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{place}: not UTF-8 ({error.reason})") from error
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{place}: not JSON ({error.msg}, column {error.colno})",
                    fix="Write one JSON object on each line",
                ) from error
            except RecursionError as error:
                raise ConfigError(f"{place}: lists or tables are nested too deeply") from error
            except NonFiniteNumber as error:
                parsed = json.loads(line)
                message = (
                    _explain_bad_value(parsed)
                    if isinstance(parsed, dict)
                    else "a number is not finite"
                )
                raise ConfigError(
                    f"{place}: {message}: {error}",
                    fix="Write null or a finite number, or remove the row",
                ) from error
            except ValueError as error:  # more digits than Python reads
                raise ConfigError(
                    f"{place}: a number cannot be read ({error})",
                    fix="Write the number as text; tests of code may be JSON text",
                ) from error
            if not line:
                continue
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{place}: a row must be a JSON object, not {type(value).__name__}"
                )
            yield DatasetRow(place, value, line)


def _read_directory(path: Path) -> Iterator[DatasetRow]:
    if (path / "dataset_dict.json").is_file():
        splits = _read_json_list(path / "dataset_dict.json", "splits")
        raise ConfigError(
            f"{path} contains several splits: {', '.join(splits)}",
            fix=f"Name one of them, such as {path / splits[0]}",
        )
    if (path / "state.json").is_file():
        return _read_saved_dataset(path)
    files = sorted(path.glob("*.parquet"))
    splits = sorted({name.partition("-")[0] for f in files if "-of-" in (name := f.name)})
    if len(splits) > 1:
        raise ConfigError(
            f"{path} contains files of several splits: {', '.join(splits)}",
            fix=f"Name the files of one split, such as {path / (splits[0] + '-*.parquet')}",
        )
    if not files:
        raise ConfigError(
            f"{path} is not a dataset: it contains neither state.json nor *.parquet",
            fix="Name a JSONL or Parquet file, a directory of Parquet files, or one that "
            "datasets.Dataset.save_to_disk wrote",
        )
    return _read_parquet(files)


def _read_saved_dataset(path: Path) -> Iterator[DatasetRow]:
    """Yield the rows that `save_to_disk` wrote: Arrow streams, listed in state.json."""
    arrow = _import_pyarrow(path)
    if _read_json_list(path / "state.json", "_indices_data_files", []):
        raise ConfigError(
            f"{path} contains a selection of rows, not the rows themselves",
            fix="Call flatten_indices() before you save the dataset",
        )
    for entry in _read_json_list(path / "state.json", "_data_files"):
        file = path / str(entry["filename"] if isinstance(entry, dict) else entry)
        try:
            with arrow.OSFile(str(file)) as opened, arrow.ipc.open_stream(opened) as stream:
                yield from _read_batches(file, stream)
        except (OSError, arrow.ArrowInvalid) as error:
            message = str(error).partition(". Detail")[0]
            raise ConfigError(
                f"{file} cannot be read: {message}", fix="Save the dataset again"
            ) from error


def _read_json_list(file: Path, key: str, default: list[Any] | None = None) -> list[Any]:
    """Return a list in a JSON file that `datasets` wrote; raise ConfigError if it is missing."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        listed = found.get(key, default) or default
        if isinstance(listed, list):
            return listed
        message = f"the file has no list {key!r}"
    except (OSError, ValueError, AttributeError) as error:
        message = str(error)
    raise ConfigError(
        f"{file} is not a file of the package datasets: {message}", fix="Save the dataset again"
    )


def _read_parquet(files: list[Path]) -> Iterator[DatasetRow]:
    arrow = _import_pyarrow(files[0])
    from pyarrow import parquet

    for path in files:
        try:
            file = parquet.ParquetFile(path)
        except arrow.ArrowInvalid as error:
            raise ConfigError(f"{path}: not Parquet ({error})") from error
        with file:
            yield from _read_batches(path, file.iter_batches())


def _read_batches(path: Path, batches: Any) -> Iterator[DatasetRow]:
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            place = f"{path}, row {number}"
            try:
                line = json.dumps(value, allow_nan=False, ensure_ascii=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{place}: {_explain_bad_value(value)}",
                    fix="Use only text, numbers, lists and tables",
                ) from error
            yield DatasetRow(place, value, line)


def _explain_bad_value(value: dict[str, Any]) -> str:
    for column, cell in value.items():
        try:
            json.dumps(cell, allow_nan=False)
        except TypeError as error:
            return f"column {column!r} is not plain data ({error})"
        except ValueError:
            return f"column {column!r} contains a number that is not finite"
    return "the row is not plain data"


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"{path}: the package pyarrow, which reads this file, is not installed",
            fix="Run `pip install 'meshrl[data]'`",
        ) from error
    return pyarrow
