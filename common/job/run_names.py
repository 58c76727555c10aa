"""Names of jobs on a mesh that has others."""

from __future__ import annotations

from collections.abc import Container


def choose_free_name(name: str, used_names: Container[str]) -> str:
    """Return `name`, or else `name-2`, `name-3` and so on: the first that is free."""
    number, chosen = 2, name
    while chosen in used_names:
        chosen, number = f"{name}-{number}", number + 1
    return chosen
