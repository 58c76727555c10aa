"""Several errors, or several parts of one, as one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshrl.common.base.errors import ConfigError, MeshError


def raise_all(errors: Iterable[MeshError]) -> None:
    """Raises what was found, several as one, each on a line of its own; nothing: returns."""
    found = list({str(error): error for error in errors}.values())
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError("\nerror: ".join(map(str, found)))


def shown(found: Sequence[str], most: int, more: str = "; and {} more", between: str = "; ") -> str:
    """Return the first texts, and how many more there are."""
    left = len(found) - most
    return between.join(found[:most]) + (more.format(left) if left > 0 else "")
