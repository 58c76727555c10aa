"""What a mistake is: how a job that works is spoilt, and what the user must be told, by when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from loadtests.mistakes.job import Place

JOB = "job.toml"
RUN = ("run", JOB)
BEFORE_S = 3.0  # from the start of the command, for what can be known before a mesh starts
RUNNING_S = 20.0  # from the start of the command, for what only a running mesh can find out


class NotPreparedError(Exception):
    """What a mistake needs, such as a run that has finished, was not to be had."""


@dataclass(frozen=True)
class Mistake:
    """One mistake, on top of the job of `job.Place`, which runs as it is."""

    name: str
    # Regular expressions, without regard to case. Each must be found in what the command prints:
    # what is wrong, where, and what to do.
    says: tuple[str, ...]
    running: bool = False  # only a running mesh can know it
    set: Mapping[str, Any] = field(default_factory=dict)  # dotted keys of the job file; None: none
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)  # written; None: removed
    prepare: Callable[[Place], AbstractContextManager[None]] | None = None  # what takes more
    argv: tuple[str, ...] = RUN
    environ: Mapping[str, str] = field(default_factory=dict)
    own_s: float = 0.0  # what the user's own code takes before anybody can know
    ends: bool = True  # the command ends by itself, and not with status 0
    hides: tuple[str, ...] = ()  # texts that must not be printed
    changes: tuple[str, ...] = ()  # files and folders of the user that may change

    @property
    def by_s(self) -> float:
        """Seconds from the start of the command in which it must be said."""
        return (RUNNING_S if self.running else BEFORE_S) + self.own_s


def does(change: Callable[[Place], Any]) -> Callable[[Place], AbstractContextManager[None]]:
    """Return a `prepare` that changes the place and leaves nothing to undo."""

    @contextmanager
    def prepare(place: Place) -> Iterator[None]:
        change(place)
        yield

    return prepare


def config(**keys: Any) -> Callable[[Place], AbstractContextManager[None]]:
    """Return a `prepare` that sets keys of the model's configuration."""
    return does(lambda place: place.config(**keys))
