"""Rows of the conformance set: the tests of a row, one right and two subtly wrong solutions.

`data/` has a file for each style, a shape of public corpora; texts and values are our own. A line
is one row: its name, its right solution, two edits that make it wrong, and what a row of a dataset
would hold as tests for `code_tests`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.grading.code.pytest_tests import PytestJails
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter, add_pytest
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import CallResult

RIGHT, WRONG = "right", ("wrong1", "wrong2")
STYLES = ("humaneval", "mbpp", "apps", "livecodebench", "unit")
DATA = Path(__file__).parent / "data"
# Outputs that are too long for a line of data, by the row whose case has null there.
LONG = {"many_lines": "".join(f"{i} {i * i}\n" for i in range(9000))}
Answers = dict[tuple[str, str], CallResult]  # by row and solution


async def graded(rows: Iterable[Row], jobs: int, runner: str) -> Answers:
    """Return the grades of `code_tests` for every solution, `jobs` graded at a time."""
    clock = SystemClock()
    slots = JailSlots(clock, jobs)
    turns = asyncio.Semaphore(2 * jobs)
    found: Answers = {}
    with tempfile.TemporaryDirectory(prefix="conformance-") as place:
        log = Path(place, "jails.log")
        launcher = JailLauncher(
            SystemHost(), clock, "bwrap", Interpreter.default(), cgroups.find_parents(), log
        )
        await launcher.start()
        interpreter = add_pytest(Interpreter.default())
        suites = PytestJails(
            JailLauncher(SystemHost(), clock, "bwrap", interpreter, cgroups.find_parents(), log)
        )

        async def one(row: Row, which: str) -> None:
            text = f"The program:\n\n```python\n{row.solutions[which]}```\n"
            turn = {"role": "model", "text": text}
            options = {"runner": runner}
            async with turns:
                grading = CodeGrader(launcher, slots, JailLimits(), options, suites)
                found[row.name, which] = await grading.compute_reward({"tests": row.tests}, [turn])

        try:
            await asyncio.gather(*(one(row, which) for row in rows for which in row.solutions))
        finally:
            await launcher.stop()
            await suites.launcher.stop()
    return found


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
    with (DATA / f"{style}.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            name, tests, right = row["name"], row["tests"], row["right"]
            for case in tests if name in LONG else []:
                case["output"] = LONG[name] if case["output"] is None else case["output"]
            yield Row(name, style, tests, right, *(edited(right, edit) for edit in row["wrong"]))


ALL = [row for style in STYLES for row in read(style)]
