"""A row of the conformance set: its tests, one right and two subtly wrong solutions.

Rows say of a wrong solution only where it differs from the right one. Styles are shapes of public
corpora; texts and data are our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

RIGHT, WRONG = "right", ("wrong1", "wrong2")

Edit = tuple[str, str] | tuple[str, str, str, str]  # (old, new) once or twice, each old found once


@dataclass(frozen=True)
class Row:
    """`tests` is what a dataset's row would hold for `code_tests`."""

    name: str
    style: str
    tests: Any
    right: str
    wrong1: str
    wrong2: str

    @property
    def solutions(self) -> dict[str, str]:
        return {RIGHT: self.right, **dict(zip(WRONG, (self.wrong1, self.wrong2), strict=True))}


def row(name: str, style: str, tests: Any, right: str, first: Edit, second: Edit) -> Row:
    right = right.lstrip("\n")
    return Row(name, style, tests, right, edited(right, first), edited(right, second))


def edited(right: str, edit: Edit) -> str:
    wrong = right
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        if wrong.count(old) != 1:
            raise ValueError(f"{old!r} is in a solution {wrong.count(old)} times:\n{right}")
        wrong = wrong.replace(old, new)
    return wrong


def humaneval(name: str, right: str, asserts: str, first: Edit, second: Edit) -> Row:
    """A function, and `check(candidate)` with assertions."""
    tests = f"from solution import {name}\n\n\ndef check(candidate):\n{indented(asserts)}\n\n\n"
    tests += f"def test_{name}():\n    check({name})\n"
    return row(name, "humaneval", tests, right, first, second)


def mbpp(name: str, right: str, asserts: str, first: Edit, second: Edit) -> Row:
    """Three assertions, each a test, which name what they use; lines before them are shared."""
    head: list[str] = []
    lines: list[str] = []
    for line in asserts.strip().splitlines():
        (lines if line.startswith("assert") else head).append(line)
    function = re.findall(r"^def (\w+)", right, re.MULTILINE)[-1]
    imported = "*" if len(name) % 2 else function  # both are common
    tests = f"from solution import {imported}\n" + "".join(f"{line}\n" for line in head)
    for number, line in enumerate(lines, 1):
        tests += f"\n\ndef test_{number}():\n    {line}\n"
    return row(name, "mbpp", tests, right, first, second)


def apps(name: str, right: str, cases: Iterable[tuple[str, str]], first: Edit, second: Edit) -> Row:
    """A program that reads and prints, and its inputs and outputs."""
    tests = [{"input": given, "output": wanted} for given, wanted in cases]
    return row(name, "apps", tests, right, first, second)


def stdin(name: str, right: str, tests: str, first: Edit, second: Edit) -> Row:
    """The same, with its cases in JSON: `[[input, output], ...]`."""
    cases = [{"input": given, "output": wanted} for given, wanted in json.loads(tests)]
    return row(name, "livecodebench", cases, right, first, second)


def calls(name: str, right: str, tests: str, first: Edit, second: Edit) -> Row:
    """A method of `Solution`, or a function, and its cases in JSON: `[[args, output], ...]`."""
    cases = [{"args": args, "output": wanted} for args, wanted in json.loads(tests)]
    held = {"function": name, "cases": cases}
    return row(name.replace(".", "_"), "livecodebench", held, right, first, second)


def unit(name: str, right: str, tests: str, first: Edit, second: Edit) -> Row:
    """A module of a project, and its unit tests."""
    return row(name, "unit", tests.lstrip("\n"), right, first, second)


def indented(lines: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in lines.strip("\n").splitlines())
