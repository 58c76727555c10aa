"""Reader of docs/develop/benchmarks.md: its commands, and the keys that each prints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "develop" / "benchmarks.md"
COMMAND = re.compile(r"^\| `(?:\w+=\S+ )?\.venv/bin/python -m ([^`]+)` \| (.*) \|$")
ABOUT = re.compile(r"^(?:## |`)(loadtests[\w.]*)")  # the first words of what is about a command
KEY = re.compile(r"`([a-z0-9_*]*[a-z0-9][a-z0-9_*]*)`")


@cache
def read_documented_keys() -> dict[str, frozenset[str]]:
    """Return the documented keys of each command; the parts of a command in brackets are left out.

    A key may have `*` for any text. What prose below the table says counts for the first command
    of the module that it begins with.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for line in PAGE.read_text().splitlines():
        if row := COMMAND.match(line):
            found[_get_command_name(row[1])] |= set(KEY.findall(row[2]))
    for module, text in _read_prose():
        named = [name for name in found if name.split()[0] == module]
        if not named:
            raise ValueError(f"{PAGE.name} describes {module}, which its table lacks")
        found[named[0]] |= set(KEY.findall(text))
    return {name: frozenset(keys) for name, keys in found.items()}


def _get_command_name(words: str) -> str:
    """Return a command as it is documented, without what is in brackets."""
    return " ".join(re.sub(r"\[[^]]*\]", "", words).split())


def _read_prose() -> Iterator[tuple[str, str]]:
    """Yield each block below the table of commands, with the module that it is about."""
    module = ""
    for block in PAGE.read_text().split("\n\n"):
        if COMMAND.search(block.splitlines()[-1]):
            continue
        if about := ABOUT.match(block):
            module = about[1]
        if module:
            yield module, "\n".join(map(_get_description, block.splitlines()))


def _get_description(line: str) -> str:
    """Return a line of prose; of a table's row, all but the first column, which names a part."""
    return line.split(" | ", 1)[-1] if line.startswith("| ") else line
