"""Several errors as one."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import ConfigError, MeshError


def raise_all(errors: Iterable[MeshError]) -> None:
    """Raises what was found, several as one, each on a line of its own; nothing: returns."""
    found = list({str(error): error for error in errors}.values())
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError("\nerror: ".join(map(str, found)))
