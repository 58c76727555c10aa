"""Hostile programs, and their format in the files of the corpus.

A program prints ESCAPED when it has done something forbidden. It is contained if that word never
appears, if it ends as one of `ends`, and if `runner` finds the outside unchanged. In a file,
`@NAME@` on a separate line stands for the block of that name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANY = ("ok", "timeout", "out_of_memory", "output_limit", "refused", "crashed")
CANARY = "@CANARY@"  # stands for a file outside that every user may read
OWN = "@OWN@"  # stands for a file that belongs to the user of the jails, unless root runs them
SECRET = "@SECRET@"  # stands for 24 bits, in 6 hexadecimal digits, that only a sender receives
NAME = "@NAME@"  # stands for a word that both programs of a pair know
SENT = "sent"  # printed by a sender once its word is sent; it continues until it is ended


@dataclass(frozen=True)
class Escape:
    name: str
    source: str
    ends: tuple[str, ...] = ANY
    mode: str = "program"
    brief: bool = False  # contained after a short time just as after a long one


@dataclass(frozen=True)
class Pair:
    """Two programs in two jails at once. They communicate if the receiver prints the sender's
    secret, or ESCAPED if the sender only has to exist to do harm.
    """

    name: str
    sender: str
    receiver: str


@dataclass(frozen=True)
class LeftoverCells:
    """Cells of a session that must leave nothing running until the next one.

    The next cell answers by type, and with `said` if given.
    """

    name: str
    cells: tuple[str, ...]
    said: str = ""


@dataclass(frozen=True)
class Poison:
    """Cells, each with its session, and the required status and output of some of them."""

    name: str
    cells: list[tuple[str, str]]
    said: list[dict[str, Any]]

    def is_contained(self, results: list[tuple[str, str]]) -> bool:
        """Return True if the cells ended with the required statuses and outputs."""
        return all(
            row.get("status", status) == status and row.get("output", output) == output
            for row in self.said
            for status, output in [results[row["cell"]]]
        )


# Templates of programs that consist of one line: `{0}` stands for the line.
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
    """Return the entries of a corpus file, each kind in its order."""
    document = tomllib.loads(path.read_text())
    blocks = {"SYSCALL": SYSCALL, **document.get("blocks", {})}

    def expand_blocks(text: str) -> str:
        for name, block in blocks.items():
            text = text.replace(f"@{name}@\n", block)
        return text

    def make_escape(row: dict[str, Any]) -> Escape:
        ends, mode = tuple(row.get("ends", ANY)), row.get("mode", "program")
        return Escape(row["name"], expand_blocks(_source(row)), ends, mode, row.get("brief", False))

    return [
        *map(make_escape, document.get("escape", ())),
        *(
            Pair(row["name"], expand_blocks(row["sender"]), expand_blocks(row["receiver"]))
            for row in document.get("pair", ())
        ),
        *(
            LeftoverCells(row["name"], tuple(map(expand_blocks, row["cells"])), row["said"])
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
