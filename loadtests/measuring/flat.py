"""Flat figures: the form in which every load test prints its last line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures with each object inside replaced by its entries, named `outer_inner`.

    Raises:
        ValueError: Two figures would get the same name.
    """
    found: dict[str, Any] = {}
    for name, value in figures.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        for key, figure in inner.items():
            whole = f"{name}_{key}" if key else name
            if whole in found:
                raise ValueError(f"two figures are called {whole}")
            found[whole] = figure
    return found
