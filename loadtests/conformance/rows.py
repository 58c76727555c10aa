"""Rows of the conformance set: the tests of a row, one right and two subtly wrong solutions.

`data/` has a file for each style, a shape of public corpora; texts and values are our own. A line
is one row: its name, its right solution, two edits that make it wrong, and what a row of a dataset
would hold as tests for `code_tests`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RIGHT, WRONG = "right", ("wrong1", "wrong2")
STYLES = ("humaneval", "mbpp", "apps", "livecodebench", "unit")
DATA = Path(__file__).parent / "data"
# Outputs that are too long for a line of data, by the row whose case has null there.
LONG = {"many_lines": "".join(f"{i} {i * i}\n" for i in range(9000))}


@dataclass(frozen=True)
class Row:
    """Tests and three solutions; `tests` is what a dataset's row would hold for `code_tests`."""

    name: str
    style: str
    tests: Any
    right: str
    wrong1: str
    wrong2: str

    @property
    def solutions(self) -> dict[str, str]:
        return {RIGHT: self.right, **dict(zip(WRONG, (self.wrong1, self.wrong2), strict=True))}


def edited(right: str, edit: list[str]) -> str:
    """Return a solution with each old text, which must occur once, replaced by the new one.

    Args:
        right: The solution.
        edit: Old and new text in turn.
    """
    wrong = right
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        if wrong.count(old) != 1:
            raise ValueError(f"{old!r} is in a solution {wrong.count(old)} times:\n{right}")
        wrong = wrong.replace(old, new)
    return wrong


def read(style: str) -> Iterator[Row]:
    """Yield the rows of a style in the order of its file."""
    with (DATA / f"{style}.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            name, tests, right = row["name"], row["tests"], row["right"]
            for case in tests if name in LONG else []:
                case["output"] = LONG[name] if case["output"] is None else case["output"]
            yield Row(name, style, tests, right, *(edited(right, edit) for edit in row["wrong"]))


ALL = [row for style in STYLES for row in read(style)]
