"""Preparations of a mistake that are more than files: context managers over its folder, by name.

Open `models.py` first: the changes of a model's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from loadtests.mistakes.job import Place
from loadtests.mistakes.preparing import hosts, models, runs

PREPARATIONS: Mapping[str, Callable[..., AbstractContextManager[None]]] = {
    **models.CHANGES,
    **hosts.PREPARATIONS,
    **runs.PREPARATIONS,
}


def prepared(place: Place, name: str, *arguments: object) -> AbstractContextManager[None]:
    """Return the context in which a mistake is tried."""
    return PREPARATIONS[name](place, *arguments)
