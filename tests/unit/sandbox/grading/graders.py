"""Graders of this folder's tests, and the tests' rows."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.grading.code.pytest_tests import PytestJails
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import CallResult
from tests.load import scaled

on_shared_loop = pytest.mark.asyncio(loop_scope="module")  # the loop of a module's launcher


def read_rows(name: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / name).read_text())[kind]
    return found


def make_turns(text: str) -> list[dict[str, Any]]:
    return [{"role": "model", "text": text}]


async def grade(
    launcher: JailLauncher,
    tests: Any,
    source: str,
    suites: PytestJails | None = None,
    **options: Any,
) -> CallResult:
    """Grade a program; unless an option sets it, the time per case allows for a busy host."""
    slots = JailSlots(SystemClock(), 2)
    grader = CodeGrader(launcher, slots, JailLimits(), {"case_s": scaled(2.0)} | options, suites)
    return await grader.compute_reward({"tests": tests}, make_turns(source))


class BatchGrader:
    """Grader of many programs at once."""

    def __init__(self, launcher: JailLauncher, **options: Any) -> None:
        slots = JailSlots(SystemClock(), 4)
        self.grader = CodeGrader(launcher, slots, JailLimits(), {"case_s": scaled(5.0)} | options)

    async def answer(self, tests: Any, source: str) -> CallResult:
        return await self.grader.compute_reward(
            {"tests": tests}, make_turns(f"```python\n{source}\n```")
        )

    async def grade_all(self, programs: dict[str, tuple[Any, str]]) -> dict[str, Any]:
        """Return the score of each (tests, program) by name."""
        answers = await asyncio.gather(*(self.answer(*pair) for pair in programs.values()))
        return {
            name: answer.value if answer.status == "ok" else answer
            for name, answer in zip(programs, answers, strict=True)
        }
