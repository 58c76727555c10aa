"""Writer of a job's document as TOML."""

from __future__ import annotations

import json
from typing import Any


def to_toml(document: dict[str, Any]) -> str:
    """Return a job's document as TOML; `tomllib` reads the same document back."""
    return "\n".join(_format_table(document, "")) + "\n"


def _format_table(table: dict[str, Any], path: str) -> list[str]:
    lines = [
        f"{_format_key(k)} = {_format_value(v)}" for k, v in table.items() if not _is_section(v)
    ]
    if path and (lines or not table):
        lines.insert(0, f"\n[{path}]")
    for key, value in table.items():
        if _is_section(value):
            lines += _format_table(
                value, f"{path}.{_format_key(key)}" if path else _format_key(key)
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
