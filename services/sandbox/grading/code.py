"""The reward `code_tests`: the share of its tests that a program passes.

No test is where the program can read or change it. Cases with standard input and output (`printed`)
and calls of a function (`called`) are compared here, after the program has answered; tests in
Python run in a jail of their own (`isolated`). A case that runs out of its limits, or whose program
dies, is not passed. That no jail can be made, that the tests themselves are broken, or that no
runner can run them, is an error, not a score.
"""

from __future__ import annotations

from typing import Any

from common.api.sandbox import BAD_VALUE, CRASHED, OK, RAISED, UNSUPPORTED
from common.grading import cases
from common.grading.cases import BadTests
from common.grading.support import Unsupported
from services.sandbox.answer import Answer
from services.sandbox.grading import called, isolated, printed
from services.sandbox.grading.answers import answer_of
from services.sandbox.grading.attempt import Attempt
from services.sandbox.grading.programs import program_of
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails import JailFailed
from services.sandbox.isolation.limits import JailLimits
from services.sandbox.isolation.slots import JailSlots


class Grading:
    """The grading of one answer."""

    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        job: str,
        limits: JailLimits,
        options: dict[str, Any],
    ) -> None:
        self._options = options
        self._attempt = Attempt(launcher, slots, job, limits, options)

    async def reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> Answer:
        """The share of tests passed; all or nothing without `partial`."""
        answer = answer_of(turns, self._options)
        prefix = str(self._options.get("prefix", ""))
        try:
            tests = cases.read(row[self._options.get("tests", "tests")])
            prints = isinstance(tests, cases.PrintedTests)
            program = program_of(answer, prefix, cases.names(tests), prints)
            passed = await self._passed(prefix + program, tests) if program.strip() else [False]
        except Unsupported as error:
            return Answer(UNSUPPORTED, None, str(error))
        except (BadTests, KeyError, TypeError, ValueError) as error:
            return Answer(BAD_VALUE, None, f"tests: {type(error).__name__}: {error}")
        except JailFailed as error:
            return Answer(CRASHED, None, str(error))
        if not passed:
            return Answer(RAISED, None, "the row has no tests")
        score = sum(passed) / len(passed)
        return Answer(OK, score if self._attempt.partial else float(all(passed)), "")

    async def _passed(self, source: str, tests: cases.Tests) -> list[bool]:
        if isinstance(tests, str):
            return await isolated.passed(self._attempt, source, tests)
        if isinstance(tests, cases.CalledTests):
            return await called.passed(self._attempt, source, tests.function, tests.cases)
        return await printed.passed(self._attempt, source, tests.cases)
