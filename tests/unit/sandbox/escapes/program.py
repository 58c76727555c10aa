"""What a hostile program is, and how the files of the corpus say it.

A program prints ESCAPED when it has done what it must not. It is contained when that word never
appears, when it ends as one of `ends`, and when what `runner` looks at outside is as it was. In a
file, `@NAME@` on a line of its own stands for the block of that name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANY = ("ok", "timeout", "out_of_memory", "output_limit", "refused", "crashed")
CANARY = "@CANARY@"  # stands for a file outside that every user may read
OWN = "@OWN@"  # for one that belongs to the user of the jails, where root does not make them
SECRET = "@SECRET@"  # for 24 bits, as 6 hexadecimal digits, that only the sender of a pair is told
NAME = "@NAME@"  # for a word that both programs of a pair know
SENT = "sent"  # what a sender prints once its word is on the way; it goes on until it is ended


@dataclass(frozen=True)
class Escape:
    name: str
    source: str
    ends: tuple[str, ...] = ANY
    mode: str = "program"


@dataclass(frozen=True)
class Pair:
    """Two programs in two jails at once. They talk when the receiver prints the sender's secret, or
    ESCAPED where the sender only has to be there to do harm.
    """

    name: str
    sender: str
    receiver: str


@dataclass(frozen=True)
class Left:
    """Cells of a session after which nothing of it may run until the next, which answers by type,
    and with `said` if that is given.
    """

    name: str
    cells: tuple[str, ...]
    said: str = ""


@dataclass(frozen=True)
class Poison:
    """Cells, each of a session, and what some of them must come to: their place, status, output."""

    name: str
    cells: list[tuple[str, str]]
    said: list[dict[str, Any]]

    def holds(self, said: list[tuple[str, str]]) -> bool:
        """Whether the cells have come to these statuses and outputs, as they must."""
        return all(
            row.get("status", status) == status and row.get("output", output) == output
            for row in self.said
            for status, output in [said[row["cell"]]]
        )


# How a program is written that one line says: its text, in which the line stands for `{0}`.
FORMS = {
    "reads": """
try:
    with open({0!r}, "rb") as file:
        print("ESCAPED", file.read(64))
except OSError as error:
    print("kept in", error)
""",
    "writes": """
try:
    with open({0!r}, "ab") as file:
        file.write(b"x")
        file.flush()
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    "socket": """
import socket
try:
    s = {0}
    print("ESCAPED", s)
except OSError as error:
    print("kept in", error)
""",
    # A system call (its number on x86-64) that must not succeed.
    "call": """
@SYSCALL@
result = syscall({0})
print("ESCAPED" if result >= 0 else "kept in", result)
""",
    # Expressions, each of which must fail.
    "tries": """
import os
{1}
for name, attempt in ({0},):
    try:
        print("ESCAPED", name, attempt())
    except (OSError, ValueError) as error:
        print("kept in", name, error)
""",
}
SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    typed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *typed)
    return result if result >= 0 else -ctypes.get_errno()
def called(number, *arguments):
    result = syscall(number, *arguments)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
"""


def read(path: Path) -> list[Any]:
    """Return what a file of the corpus holds, each kind in its order."""
    document = tomllib.loads(path.read_text())
    blocks = {"SYSCALL": SYSCALL, **document.get("blocks", {})}

    def whole(text: str) -> str:
        for name, block in blocks.items():
            text = text.replace(f"@{name}@\n", block)
        return text

    def escape(row: dict[str, Any]) -> Escape:
        ends, mode = tuple(row.get("ends", ANY)), row.get("mode", "program")
        return Escape(row["name"], whole(_source(row)), ends, mode)

    return [
        *map(escape, document.get("escape", ())),
        *(
            Pair(row["name"], whole(row["sender"]), whole(row["receiver"]))
            for row in document.get("pair", ())
        ),
        *(
            Left(row["name"], tuple(map(whole, row["cells"])), row["said"])
            for row in document.get("left", ())
        ),
        *(Poison(**row) for row in document.get("poison", ())),
    ]


def _source(row: dict[str, Any]) -> str:
    for form, text in FORMS.items():
        if form == "tries" and form in row:
            attempts = ", ".join(f"({each!r}, lambda: {each})" for each in row[form])
            return text.format(attempts, row.get("setup", ""))
        if form in row:
            return text.format(row[form])
    return str(row["source"])
