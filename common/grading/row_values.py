"""Values of a row by key, which may be dotted: `reward_model.ground_truth`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def get_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key; KeyError without one.

    A key of the row that contains the dots itself has precedence over a key of an inner table.
    """
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(key)
        value = value[name]
    return value


def find_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or None without one."""
    return get_value(row, key) if has_value(row, key) else None


def has_value(row: Mapping[str, Any], key: str) -> bool:
    """Return True if the row has a value under the key."""
    try:
        get_value(row, key)
    except KeyError:
        return False
    return True


def format_keys(row: Mapping[str, Any]) -> str:
    """Return the keys of a row for a message, with those of inner tables dotted."""
    keys = [
        f"{key}.{inner}" if inner else key
        for key, value in row.items()
        for inner in (value if isinstance(value, Mapping) and value else [""])
    ]
    return ", ".join(map(repr, keys)) or "nothing"
