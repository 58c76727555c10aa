"""Reader of TOML files with the line of each key, for messages; `tomllib` does not report lines."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.job.toml.foreign_files import describe_foreign_text, suggest_path

_KEY_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")
_DUPLICATE_FIX = "Keep one of them: a key or table of that name is defined above"
_SYNTAX_FIXES = {  # by how tomllib's message begins
    "Cannot overwrite": _DUPLICATE_FIX,
    "Cannot declare": _DUPLICATE_FIX,
    "Invalid value": "Put text in quotes; write true and false in lower case",
}


def read_toml(path: Path, description: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's document and the location of each key.

    `description` names the file in the message when it cannot be read. Raises ConfigError when it
    is no TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        message = f"cannot read {description} {path}: {error.strerror}"
        raise ConfigError(message, fix=suggest_path(path, description == "the job file")) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise _make_syntax_error(path, text, str(error)) from error
    return document, {key: f"{path}, line {n}" for key, n in find_key_lines(text).items()}


def make_error(
    path: Path, locations: Mapping[str, str], key: str, message: str, fix: str = ""
) -> ConfigError:
    """Return an error with the location of `key`, or of the table that it would be in."""
    lines = {k: i for i, k in enumerate(locations, 1)}
    index = find_line(lines, key)
    place = list(locations.values())[index - 1] if index else str(path)
    return ConfigError(f"{place}: {message}", fix=fix)


def _make_syntax_error(path: Path, text: str, message: str) -> ConfigError:
    """Return the error of `tomllib`, with the line itself, or of a file of another kind."""
    foreign, equivalent = describe_foreign_text(path, text)
    if foreign:
        return ConfigError(foreign, fix=equivalent)
    fix = next((fix for start, fix in _SYNTAX_FIXES.items() if message.startswith(start)), "")
    if not (place := re.search(r" \(at (line (\d+), column \d+)\)$", message)):
        return ConfigError(f"{path}: {message}", fix=fix)
    line = text.split("\n")[int(place[2]) - 1].strip()
    return ConfigError(f"{path}, {place[1]}: {message[: place.start()]}: {line}", fix=fix)


def find_key_lines(text: str) -> dict[str, int]:
    """Return dotted key -> line number (from 1) of each table header and each `key =` at a line's
    start.

    The tables of `[[list]]` are `list[0]`, `list[1]` and so on. Keys inside inline tables are not
    listed; `find_line` falls back to their parent.
    """
    found: dict[str, int] = {}
    rows: dict[str, int] = {}  # tables of each list so far
    table = ""
    for number, line in _iterate_statements(text):
        stripped = line.strip()
        if stripped.startswith("["):
            table = ""
            for part in _parse_key(stripped.lstrip("[")):
                name = f"{table}.{part}" if table else part
                table = f"{name}[{rows[name] - 1}]" if name in rows else name
            if stripped.startswith("[["):
                found.setdefault(name, number)
                rows[name] = rows.get(name, 0) + 1
                table = f"{name}[{rows[name] - 1}]"
            found.setdefault(table, number)
        elif parts := _parse_key(stripped):
            found.setdefault(".".join(([table] if table else []) + parts), number)
    return found


def find_line(lines: dict[str, int], key: str) -> int:
    """Return the line of `key`, or of its closest parent that has one; 0 when none has."""
    while key:
        if key in lines:
            return lines[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return 0


def _parse_key(text: str) -> list[str]:
    parts: list[str] = []
    position = 0
    while match := _KEY_PART.match(text, position):
        parts.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if position >= len(text) or text[position] != ".":
            break
        position += 1
    return parts


def _iterate_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines that begin a statement: not inside a multi-line string or an unfinished array."""
    quote, depth = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not quote and depth == 0 and line.strip() and not line.lstrip().startswith("#"):
            yield number, line
            if line.lstrip().startswith("["):
                continue
        quote, depth = _scan_line(line, quote, depth)


def _scan_line(line: str, quote: str, depth: int) -> tuple[str, int]:
    """Follow strings and brackets through a line: (open multi-line quote, brackets) at its end."""
    i = 0
    while i < len(line):
        if quote:
            if line.startswith(quote, i):
                i, quote = i + len(quote), ""
            else:
                i += 2 if line[i] == "\\" and quote[0] == '"' else 1
            continue
        char = line[i]
        if char == "#":
            break
        if char in "\"'":
            quote = char * 3 if line.startswith(char * 3, i) else char
            i += len(quote)
            continue
        depth += (char in "[{") - (char in "]}")
        i += 1
    return (quote if len(quote) == 3 else ""), max(depth, 0)
