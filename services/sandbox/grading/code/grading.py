"""The reward `code_tests`: the share of its tests that a program passes.

No test is where the program can read or change it. Cases with standard input and output, and
calls of a function (`called`), are compared here, after the program has answered; tests in
Python run in a jail of their own (`isolated`), and those that this cannot run under the real pytest
beside the program (`real_pytest`), where a program can forge them. A case that runs out of its
limits, or whose program dies, is not passed. That no jail can be made, that the tests themselves
are broken, or that no runner can run them, is an error, not a score.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from meshrl.common.api.sandbox import BAD_VALUE, CRASHED, OK, RAISED, TIMEOUT, UNSUPPORTED
from meshrl.common.grading import cases, shapes
from meshrl.common.grading.answers import answer_of
from meshrl.common.grading.cases import BadTests, CalledTests, Printed, Tests
from meshrl.common.grading.support import Unsupported, unsupported
from meshrl.services.sandbox.grading.code import called, isolated, real_pytest
from meshrl.services.sandbox.grading.code.attempt import Attempt
from meshrl.services.sandbox.grading.code.equality import same_text
from meshrl.services.sandbox.grading.code.programs import prefixed, prelude_of, program_of
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.jail.guests import judged
from meshrl.services.sandbox.outcomes import Answer

SPACES = 2  # times what is wanted that a program may print: layout, and what it says beside


class Grading:
    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        limits: JailLimits,
        options: dict[str, Any],
        suites: real_pytest.Suites | None = None,
    ) -> None:
        """`suites` is where the runner `pytest` runs; without it, there is none."""
        self._options, self._suites = options, suites
        self._attempt = Attempt(launcher, slots, limits, options)

    async def reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> Answer:
        """The share of tests passed; all or nothing without `partial`."""
        answer = answer_of(turns, self._options) or ""
        prefix = str(self._options.get("prefix", ""))
        try:
            style, tests = shapes.read(shapes.column(row, self._options.get("tests", "tests")))
            program = program_of(answer, prefix, cases.names(tests), style == shapes.STDIN)
            passed = [False]
            if program.strip():
                source = prefixed(prefix, program)
                if isinstance(tests, CalledTests) or judged.CLASS in cases.names(tests):
                    source = prefixed(prelude_of(source), source)
                passed = await self._passed(source, tests)
        except Unsupported as error:
            return Answer(UNSUPPORTED, None, str(error))
        except (BadTests, LookupError, TypeError, ValueError, AttributeError) as error:
            return Answer(BAD_VALUE, None, f"tests: {type(error).__name__}: {error}")
        except JailFailed as error:
            return Answer(CRASHED, None, str(error))
        if not passed:
            return Answer(RAISED, None, "the row has no tests")
        score = sum(passed) / len(passed)
        return Answer(OK, score if self._attempt.partial else float(all(passed)), "")

    async def _passed(self, source: str, tests: Tests) -> list[bool]:
        if isinstance(tests, str):
            return await self._in_python(source, tests)
        if isinstance(tests, CalledTests):
            return await called.passed(self._attempt, source, tests.function, tests.cases)
        found: list[bool] = []
        while len(found) < len(tests.cases) and not self._attempt.over(found):
            found.append(await self._printed(source, tests.cases[len(found)]))
        return found + [False] * (len(tests.cases) - len(found))

    async def _printed(self, source: str, case: Printed) -> bool:
        """True if the program passes the case, in a jail of its own."""
        attempt, program = self._attempt, Program(source, graded=True)
        wanted = max(len(text.encode()) for text in case.accepted)
        most = attempt.limits.output_bytes + SPACES * wanted
        limits = replace(attempt.limits, output_bytes=most)
        async with attempt.slots.one():
            while (ran := await attempt.launcher.run(program, limits, case.stdin.encode())).starved:
                attempt.starved(ran)
        attempt.late += ran.status == TIMEOUT
        if ran.status != OK or ran.exit:
            return False
        said = ran.stdout.decode("utf-8", "replace")
        return any(same_text(said, text, attempt.tolerance) for text in case.accepted)

    async def _in_python(self, source: str, tests: str) -> list[bool]:
        """By the runner that the job names; `auto` is the isolated one where it can run them."""
        runner, why = str(self._options.get("runner", "auto")), ""
        if runner != "pytest":
            try:
                if not (lacks := _lacks(tests)):
                    return await isolated.passed(self._attempt, source, tests)
                why = f"the runner isolated cannot run: {', '.join(lacks)}"
            except Unsupported as error:  # it has shown when the tests ran
                if error.provoked:  # no program chooses the runner that it can forge
                    raise
                why = str(error)
            if runner == "isolated" or self._suites is None:
                raise Unsupported(why)
        assert self._suites is not None
        try:
            return await real_pytest.passed(self._attempt, self._suites, source, tests)
        except Unsupported as error:
            raise Unsupported("; ".join(filter(None, (why, str(error))))) from None


@functools.lru_cache(shapes.KNOWN)
def _lacks(tests: str) -> tuple[str, ...]:
    """What the runner isolated cannot run; as long to find out as a jail takes to begin."""
    return unsupported(tests)
