"""Tests of a program that reads its standard input and prints: compared after it has ended."""

from __future__ import annotations

from dataclasses import replace

from common.api.sandbox import OK, TIMEOUT
from common.grading.cases import Printed
from services.sandbox.grading.code.attempt import Attempt
from services.sandbox.grading.code.equality import same_text
from services.sandbox.isolation.jails.program import Program

SPACES = 2  # times what is wanted that a program may print: layout, and what it says beside


async def passed(attempt: Attempt, source: str, cases: list[Printed]) -> list[bool]:
    """Which of the cases the program passes, each in a jail of its own."""
    found: list[bool] = []
    while len(found) < len(cases) and not attempt.over(found):
        found.append(await _printed(attempt, source, cases[len(found)]))
    return found + [False] * (len(cases) - len(found))


async def _printed(attempt: Attempt, source: str, case: Printed) -> bool:
    wanted = max(len(text.encode()) for text in case.accepted)
    limits = attempt.limits
    limits = replace(limits, output_bytes=limits.output_bytes + SPACES * wanted)
    program = Program(source, graded=True)
    async with attempt.slots.one():
        while (ran := await attempt.launcher.run(program, limits, case.stdin.encode())).starved:
            attempt.starved(ran)
    attempt.late += ran.status == TIMEOUT
    said = ran.stdout.decode("utf-8", "replace")
    return (
        ran.status == OK
        and ran.exit == 0
        and any(same_text(said, text, attempt.tolerance) for text in case.accepted)
    )
