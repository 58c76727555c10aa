"""Dataset files: JSONL, read line by line and checked before a mesh starts on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError


def lines(path: Path, prompt: str = "") -> Iterator[tuple[int, str]]:
    """(line number, line) of every row, blank lines left out.

    ConfigError names file and line of one that is no JSON object in UTF-8, or lacks `prompt`.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            place = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8").strip()
                row = json.loads(line) if line else None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{place}: not UTF-8 ({error.reason})") from error
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{place}: not JSON ({error.msg}, column {error.colno})"
                ) from error
            if not line:
                continue
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: a row is a JSON object, not {type(row).__name__}")
            if prompt and not isinstance(row.get(prompt), str):
                raise ConfigError(f"{place}: the row has no string {prompt!r}")
            yield number, line
