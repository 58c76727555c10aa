"""A TOML file as people write it: read with the line of each key, for what is to be said of one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from meshrl.job.toml.lines import key_lines, line_of

_ONCE = "A key or table of that name stands above: keep one of them"
_SYNTAX_FIXES = {  # by how tomllib's message begins
    "Cannot overwrite": _ONCE,
    "Cannot declare": _ONCE,
    "Invalid value": "Text takes quotes; true and false are written small",
}


def read(path: Path, what: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What a file says, and where it says each key; ConfigError when it is no TOML. `what` it is
    stands in the message when it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise _syntax(path, text, str(error)) from error
    return document, {key: f"{path}, line {n}" for key, n in key_lines(text).items()}


def mistake(
    path: Path, places: Mapping[str, str], key: str, message: str, fix: str = ""
) -> ConfigError:
    """The error that names where `key`, or the table that it would be in, is written."""
    lines = {k: i for i, k in enumerate(places, 1)}
    index = line_of(lines, key)
    place = list(places.values())[index - 1] if index else str(path)
    return ConfigError(f"{place}: {message}", fix=fix)


def _syntax(path: Path, text: str, wrong: str) -> ConfigError:
    """What `tomllib` says, with the line itself."""
    fix = next((fix for start, fix in _SYNTAX_FIXES.items() if wrong.startswith(start)), "")
    if not (place := re.search(r" \(at (line (\d+), column \d+)\)$", wrong)):
        return ConfigError(f"{path}: {wrong}", fix=fix)
    line = text.split("\n")[int(place[2]) - 1].strip()
    return ConfigError(f"{path}, {place[1]}: {wrong[: place.start()]}: {line}", fix=fix)
