"""Reward `code_tests`: the share of its tests that a program passes.

No program can read or change its tests. Cases with standard input and output, and calls of a
function (`function_tests`), are compared here, after the program has answered. Tests in Python run
in a jail of their own (`isolated_tests`). Those that this runner does not support run under the
real pytest beside the program (`pytest_tests`), where a program can forge results. A case that
exceeds its limits, or whose program dies, is not passed. It is an error, not a score, when no jail
can be made, when the tests are invalid, or when no runner supports them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from meshrl.common.api.sandbox import BAD_VALUE, CRASHED, OK, RAISED, TIMEOUT, UNSUPPORTED
from meshrl.common.grading import cases, styles
from meshrl.common.grading.answers import extract_answer
from meshrl.common.grading.cases import FunctionTests, InvalidTests, StdioCase, Tests
from meshrl.common.grading.isolated_support import UnsupportedTests, find_unsupported
from meshrl.services.sandbox.grading.code import function_tests, isolated_tests, pytest_tests
from meshrl.services.sandbox.grading.code.attempt import GradingAttempt
from meshrl.services.sandbox.grading.code.comparison import is_same_text
from meshrl.services.sandbox.grading.code.program_extraction import (
    build_prelude,
    extract_program,
    prepend,
)
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.jail.guests import judge_environment
from meshrl.services.sandbox.outcomes import CallResult

MAX_OUTPUT_FACTOR = 2  # times the expected output that a program may print: layout, and extra text


class CodeGrader:
    def __init__(
        self,
        launcher: JailLauncher,
        slots: JailSlots,
        limits: JailLimits,
        options: dict[str, Any],
        pytest_jails: pytest_tests.PytestJails | None = None,
    ) -> None:
        """Create the reward; without `pytest_jails` the runner `pytest` is unavailable."""
        self._options, self._pytest_jails = options, pytest_jails
        self._attempt = GradingAttempt(launcher, slots, limits, options)

    async def compute_reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> CallResult:
        """Return the share of tests passed; all or nothing without `partial`."""
        answer = extract_answer(turns, self._options) or ""
        prefix = str(self._options.get("prefix", ""))
        try:
            style, tests = styles.classify_tests(
                styles.get_tests(row, self._options.get("tests", "tests"))
            )
            program = extract_program(
                answer, prefix, cases.find_required_names(tests), style == styles.STDIN
            )
            passed = [False]
            if program.strip():
                source = prepend(prefix, program)
                if isinstance(
                    tests, FunctionTests
                ) or judge_environment.SOLUTION_CLASS in cases.find_required_names(tests):
                    source = prepend(build_prelude(source), source)
                passed = await self._run_tests(source, tests)
        except UnsupportedTests as error:
            return CallResult(UNSUPPORTED, None, str(error))
        except (InvalidTests, LookupError, TypeError, ValueError, AttributeError) as error:
            return CallResult(BAD_VALUE, None, f"tests: {type(error).__name__}: {error}")
        except JailFailed as error:
            return CallResult(CRASHED, None, str(error))
        if not passed:
            return CallResult(RAISED, None, "the row has no tests")
        score = sum(passed) / len(passed)
        return CallResult(
            OK, score if self._attempt.gives_partial_credit else float(all(passed)), ""
        )

    async def _run_tests(self, source: str, tests: Tests) -> list[bool]:
        if isinstance(tests, str):
            return await self._run_python_tests(source, tests)
        if isinstance(tests, FunctionTests):
            return await function_tests.run_tests(
                self._attempt, source, tests.function, tests.cases
            )
        found: list[bool] = []
        while len(found) < len(tests.cases) and not self._attempt.is_finished(found):
            found.append(await self._run_stdin_case(source, tests.cases[len(found)]))
        return found + [False] * (len(tests.cases) - len(found))

    async def _run_stdin_case(self, source: str, case: StdioCase) -> bool:
        """Return whether the program passes the case, in a jail of its own."""
        attempt, program = self._attempt, JailProgram(source, is_graded=True)
        max_accepted_bytes = max(len(text.encode()) for text in case.accepted_outputs)
        most = attempt.limits.output_bytes + MAX_OUTPUT_FACTOR * max_accepted_bytes
        limits = replace(attempt.limits, output_bytes=most)
        async with attempt.slots.acquire():
            while (
                ran := await attempt.launcher.run(program, limits, case.stdin.encode())
            ).is_starved:
                attempt.count_starved(ran)
        attempt.jail_ending_cases += ran.status == TIMEOUT
        if ran.status != OK or ran.exit_code:
            return False
        output = ran.stdout.decode("utf-8", "replace")
        return any(is_same_text(output, text, attempt.tolerance) for text in case.accepted_outputs)

    async def _run_python_tests(self, source: str, tests: str) -> list[bool]:
        """Run Python tests with the job's runner; `auto` is the isolated one where it supports
        them.
        """
        runner, why = str(self._options.get("runner", "auto")), ""
        if runner != "pytest":
            try:
                if not (lacks := _find_unsupported(tests)):
                    return await isolated_tests.run_tests(self._attempt, source, tests)
                why = f"the runner isolated cannot run: {', '.join(lacks)}"
            except UnsupportedTests as error:  # valid before: the tests ran
                if error.is_caused_by_solution:  # else a program could choose the forgeable one
                    raise
                why = str(error)
            if runner == "isolated" or self._pytest_jails is None:
                raise UnsupportedTests(why)
        assert self._pytest_jails is not None
        try:
            return await pytest_tests.run_tests(self._attempt, self._pytest_jails, source, tests)
        except UnsupportedTests as error:
            raise UnsupportedTests("; ".join(filter(None, (why, str(error))))) from None


@functools.lru_cache(styles.CACHED_MODULES)
def _find_unsupported(tests: str) -> tuple[str, ...]:
    """Return what the isolated runner does not support; takes as long as the start of a jail."""
    return find_unsupported(tests)
