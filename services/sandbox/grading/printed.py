"""Tests of a program that reads its standard input and prints: compared after it has ended."""

from __future__ import annotations

from typing import Any

from common.api.sandbox import OK, TIMEOUT
from services.sandbox.grading.attempt import Attempt


async def passed(attempt: Attempt, source: str, cases: list[dict[str, Any]]) -> list[bool]:
    """Which of the cases the program passes, each in a jail of its own."""
    found: list[bool] = []
    while len(found) < len(cases) and not attempt.over(found):
        found.append(await _printed(attempt, source, cases[len(found)]))
    return found + [False] * (len(cases) - len(found))


async def _printed(attempt: Attempt, source: str, case: dict[str, Any]) -> bool:
    stdin, wanted = str(case["input"]).encode(), str(case["output"]).split()
    async with attempt.slots.of(attempt.job):
        program = {"mode": "program", "source": source}
        ran = await attempt.launcher.run(program, attempt.limits, stdin)
    attempt.late += ran.status == TIMEOUT
    said = ran.stdout.decode("utf-8", "replace").split()
    return ran.status == OK and ran.exit == 0 and said == wanted
