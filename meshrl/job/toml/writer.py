"""Writer of a job's document as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(document: dict[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return a job's document as TOML, with comments behind values, by dotted key.

    `tomllib` reads the same document back.
    """
    return "\n".join(_format_table(document, "", comments or {})) + "\n"


def _format_table(table: dict[str, Any], path: str, comments: Mapping[str, str]) -> list[str]:
    lines = []
    for name, value in table.items():
        if not _is_section(value):
            comment = comments.get(f"{path}.{name}" if path else name, "")
            line = f"{_format_key(name)} = {_format_value(value)}"
            lines.append(f"{line}  # {comment}" if comment else line)
    if path and (lines or not table):
        lines.insert(0, f"\n[{path}]")
    for key, value in table.items():
        if _is_section(value):
            lines += _format_table(
                value, f"{path}.{_format_key(key)}" if path else _format_key(key), comments
            )
    return lines


def _is_section(value: Any) -> bool:
    return isinstance(value, dict)


def _format_key(key: str) -> str:
    plain = key.replace("-", "").replace("_", "")
    return key if plain.isalnum() and plain.isascii() else _format_value(key)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items())
            + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_format_value(v) for v in value) + "]"
    # Strings, numbers and booleans are written alike in both, but for characters beyond 16 bits,
    # which JSON escapes as two, and for DEL, which only TOML escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
