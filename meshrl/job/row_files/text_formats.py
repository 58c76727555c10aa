"""Readers of rows in JSONL, JSON and CSV files, also compressed with gzip."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from meshrl.common.base.encoding.finite_json import DECODER, NonFiniteNumber
from meshrl.common.base.errors import ConfigError
from meshrl.job.row_files.dataset_row import DatasetRow, explain_bad_value

COMPRESSED_SUFFIX = ".gz"
SUFFIX_FIX = (
    "Write one JSON object on each line, or give a file of another format its suffix: .json, .csv "
    "or .parquet"
)
LINE_FIXES = {
    ".jsonl": "Write one JSON object on each line",
    ".json": "Write an array of objects, or one object on each line",
}


def read_jsonl(path: Path, name: str) -> Iterator[DatasetRow]:
    """Yield the rows of a file with an object on each line; `name` is the file's in messages."""
    with _open_bytes(path, name) as file:
        for number, raw in enumerate(file, 1):
            place = f"{name}, line {number}"
            line = _decode_text(raw, place, is_first=number == 1).strip()
            if line:
                value = _parse_json(line, place, LINE_FIXES.get(path.suffix, SUFFIX_FIX))
                yield DatasetRow(place, _require_object(value, place), line)


def read_json(path: Path, name: str) -> Iterator[DatasetRow]:
    """Yield the objects of a JSON array, or the lines of a file of JSON lines."""
    with _open_bytes(path, name) as file:
        start = next((line for line in file if line.strip(b" \t\r\n\xef\xbb\xbf")), b"")
        if not start.lstrip(b" \t\xef\xbb\xbf").startswith(b"["):
            yield from read_jsonl(path, name)
            return
        file.seek(0)
        text = _decode_text(file.read(), name, is_first=True)
    for number, value in enumerate(_parse_json(text, name, LINE_FIXES[".json"]), 1):
        place = f"{name}, item {number}"
        yield DatasetRow.from_value(place, _require_object(value, place))


def read_csv(path: Path, name: str) -> Iterator[DatasetRow]:
    """Yield the rows of a CSV file whose first line has the columns; all values are texts."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _open_bytes(path, name) as file:
        lines = (
            _decode_text(raw, f"{name}, line {number}", is_first=number == 1)
            for number, raw in enumerate(file, 1)
        )
        reader = csv.reader(lines, strict=True)
        try:
            columns = next(reader, [])
            if len(columns) == 1 and re.search(r"[;\t]", columns[0]):
                raise ConfigError(
                    f"{name}, line 1: the columns are not separated by commas",
                    fix="Separate the values of all lines by commas",
                )
            if len(set(columns)) < len(columns):
                twice = next(column for column in columns if columns.count(column) > 1)
                raise ConfigError(f"{name}, line 1: column {twice!r} appears twice")
            for cells in reader:
                place = f"{name}, line {reader.line_num}"
                if len(cells) not in (0, len(columns)):
                    raise ConfigError(
                        f"{place}: the row has {len(cells)} values, and the first line "
                        f"{len(columns)} columns",
                        fix="Name the columns in the first line, and put values with commas or "
                        "line breaks in quotation marks",
                    )
                if cells:
                    yield DatasetRow.from_value(place, dict(zip(columns, cells, strict=True)))
        except csv.Error as error:
            raise ConfigError(f"{name}, line {reader.line_num}: not CSV ({error})") from error


READERS: dict[str, Callable[[Path, str], Iterator[DatasetRow]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}


@contextmanager
def _open_bytes(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed."""
    is_compressed = path.suffix == COMPRESSED_SUFFIX
    try:
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            yield cast("IO[bytes]", file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"{name}: the file cannot be decompressed: {error}", fix="Copy the file again"
        ) from error


def _decode_text(raw: bytes, place: str, *, is_first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 ({error.reason})") from error


def _parse_json(text: str, place: str, fix: str) -> Any:
    try:
        return DECODER.decode(text.strip())
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not JSON ({error.msg}, column {error.colno})", fix=fix
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{place}: lists or tables are nested too deeply") from error
    except NonFiniteNumber as error:
        parsed = json.loads(text)
        message = (
            explain_bad_value(parsed) if isinstance(parsed, dict) else "a number is not finite"
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


def _require_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: a row must be a JSON object, not {type(value).__name__}")
    return value
