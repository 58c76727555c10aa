"""User mistake: the change to a working job, the required message, and its time limit.

`mistakes.jsonl` has one mistake a line; the keys are the fields of `Mistake`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN = ("run", "job.toml")
BEFORE_S = 3.0  # from the start of the command, for what can be known before a mesh starts
RUNNING_S = 20.0  # from the start of the command, for what only a running mesh can find out
DATA = Path(__file__).with_name("mistakes.jsonl")


class NotPreparedError(Exception):
    """Error raised when a prerequisite of a mistake, such as a finished run, cannot be made."""


@dataclass(frozen=True)
class Mistake:
    """One mistake, on top of the job of `job.Place`, which runs as it is."""

    name: str
    # Case-insensitive regular expressions. Each must match the command's output:
    # the error, its place, and the fix.
    says: tuple[str, ...]
    running: bool = False  # only a running mesh can detect it
    set: Mapping[str, Any] = field(default_factory=dict)  # dotted keys of the job file; None: none
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)  # written; None: removed
    config: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json; None: none
    prepare: tuple[Any, ...] = ()  # name and arguments of one of `preparing.PREPARATIONS`
    argv: tuple[str, ...] = RUN  # of `meshrl`; a Python file instead is run as a program
    environ: Mapping[str, str] = field(default_factory=dict)
    own_s: float = 0.0  # time of the user's own code before detection is possible
    ends: bool = True  # the command ends by itself, and not with status 0
    hides: tuple[str, ...] = ()  # texts that must not be printed
    changes: tuple[str, ...] = ()  # files and folders of the user that may change

    @property
    def by_s(self) -> float:
        """Limit of the message in seconds from the start of the command."""
        return (RUNNING_S if self.running else BEFORE_S) + self.own_s


def read() -> Iterator[Mistake]:
    """Yield every mistake; the text of a file that is not UTF-8 stands under the key latin-1."""
    with DATA.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            for key, value in row.items():
                row[key] = tuple(value) if isinstance(value, list) else value
            for name, content in row.get("files", {}).items():
                if isinstance(content, dict):
                    row["files"][name] = content["latin-1"].encode("latin-1")
            yield Mistake(**row)


ALL = tuple(read())
