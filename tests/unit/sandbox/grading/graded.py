"""Grading as the tests of this folder ask for it, and their rows."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import SystemClock
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.grading.code.pytest_tests import PytestJails
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import CallResult
from tests.load import scaled


def rows(name: str, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / name).read_text())[kind]
    return found


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "model", "text": text}]


async def graded(
    launcher: JailLauncher,
    tests: Any,
    source: str,
    suites: PytestJails | None = None,
    **options: Any,
) -> CallResult:
    """Grade a program; each case has time on a busy host, too, unless an option says how much."""
    slots = JailSlots(SystemClock(), 2)
    grading = CodeGrader(launcher, slots, JailLimits(), {"case_s": scaled(2.0)} | options, suites)
    return await grading.compute_reward({"tests": tests}, said(source))


class Judge:
    """Grades programs beside each other."""

    def __init__(self, launcher: JailLauncher, **options: Any) -> None:
        slots = JailSlots(SystemClock(), 4)
        self.grading = CodeGrader(launcher, slots, JailLimits(), {"case_s": scaled(5.0)} | options)

    async def answer(self, tests: Any, source: str) -> CallResult:
        return await self.grading.compute_reward(
            {"tests": tests}, said(f"```python\n{source}\n```")
        )

    async def all(self, graded: dict[str, tuple[Any, str]]) -> dict[str, Any]:
        """The score of each (tests, program) by name."""
        answers = await asyncio.gather(*(self.answer(*pair) for pair in graded.values()))
        return {
            name: answer.value if answer.status == "ok" else answer
            for name, answer in zip(graded, answers, strict=True)
        }
