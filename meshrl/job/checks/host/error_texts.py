"""Combination of several errors, or several parts of one, into one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshrl.common.base.errors import ConfigError, MeshError


def raise_combined(errors: Iterable[MeshError]) -> None:
    """Raise the errors as one, each on a line of its own; return if there are none."""
    found = list({str(error): error for error in errors}.values())
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError("\nerror: ".join(map(str, found)))


def join_first(
    found: Sequence[str], limit: int, more_format: str = "; and {} more", separator: str = "; "
) -> str:
    """Return the first texts, and how many more there are."""
    remaining = len(found) - limit
    return separator.join(found[:limit]) + (more_format.format(remaining) if remaining > 0 else "")
