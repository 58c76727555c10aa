"""Rows that Python code passes, written as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError

ROWS_FIX = "Pass a list of dicts, a DataFrame or a Dataset; each dict is a row"


def write_rows(key: str, rows: Any, path: Path) -> None:
    """Write rows to a file. Raises ConfigError with the first one that is no plain data.

    Rows are dicts in any iterable, or of a pandas DataFrame, or of a `datasets.Dataset`.
    """
    if isinstance(rows, Mapping):
        names = ", ".join(map(repr, rows))[:200]
        raise ConfigError(
            f"{key} is a {type(rows).__name__} with the keys {names}, not a list of rows",
            fix="Pass one of its splits, as in data['train'], or a list of dicts",
        )
    if hasattr(rows, "to_dict") and type(rows).__module__.partition(".")[0] == "pandas":
        rows = rows.to_dict(orient="records")
    if isinstance(rows, bytes) or not isinstance(rows, Iterable):
        raise ConfigError(f"{key} is of type {type(rows).__name__}, not rows", fix=ROWS_FIX)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            file.write(_encode(f"{key}[{number}]", row) + "\n")


def _encode(location: str, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{location} is of type {type(row).__name__}, not a dict", fix=ROWS_FIX)
    try:
        return _to_json(dict(row))
    except (TypeError, ValueError):
        pass
    for name, cell in row.items():
        try:
            _to_json(cell)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{location}[{name!r}] is no plain data: {error}",
                fix="Use text, finite numbers, lists and dicts, or drop the column or the row",
            ) from error
    raise ConfigError(f"{location} has keys that are no text", fix="Name columns by text")


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_to_plain)


def _to_plain(value: Any) -> Any:
    """Return the lists and numbers of an array, or of a number of numpy."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it is of type {type(value).__name__}")
