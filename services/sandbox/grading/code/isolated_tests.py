"""Python tests in a jail of their own, which uses the solution's objects across a pipe.

`jail.objects` defines the operations on the solution, and `jail.testing` runs the tests. No code
that the model wrote is ever in the tests' jail. The solution's wall clock runs while its tests wait
for it. The tests send a message once they have waited for longer than a part of the case's limit,
so most operations cost no message about the clock.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from typing import Any

from meshrl.common.grading.cases import InvalidTests
from meshrl.common.grading.isolated_support import UnsupportedTests
from meshrl.services.sandbox.grading.code import attempt as attempts
from meshrl.services.sandbox.grading.code.attempt import GradingAttempt, JailedTrial
from meshrl.services.sandbox.isolation.jails.jail import MAX_SLOWDOWN
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import MIB

TEST_JAIL_BYTES = 256 * MIB  # memory of the jail that holds tests in Python
MAX_SOLUTION_WAIT_S = 10.0  # longest wait of the tests for their solution, beside their own time
UNREPORTED_WAIT_SHARE = 0.25  # of a case's limit: a wait for the solution that its clock ignores


async def run_tests(attempt: GradingAttempt, source: str, tests: str) -> list[bool]:
    async with attempt.slots.acquire():
        return await attempts.run_trials(attempt, lambda: _open_jail_pair(attempt, source, tests))


async def _open_jail_pair(attempt: GradingAttempt, source: str, tests: str) -> _JailPairTrial:
    """Open the solution's jail and its tests' jail, connected by a socket pair."""
    launcher, limits = attempt.launcher, attempt.limits
    one, other = socket.socketpair()
    with one, other, contextlib.ExitStack() as undone:
        solution = await launcher.open(JailProgram(source, "objects"), limits, peer=one.fileno())
        undone.callback(solution.close)
        files = launcher.tier != "landlock"  # there, /tmp is that of the host
        program = JailProgram(
            tests,
            "tests",
            shares_files=files,
            unreported_wait_s=UNREPORTED_WAIT_SHARE * limits.wall_s,
        )
        # The wall clock includes the tests' waits for the solution; CPU time counts as usual.
        limits = replace(limits, wall_s=MAX_SLOWDOWN * limits.wall_s + MAX_SOLUTION_WAIT_S)
        limits = limits.lower(memory_bytes=TEST_JAIL_BYTES)
        jail = await launcher.open(program, limits, peer=other.fileno())
        undone.pop_all()
        return _JailPairTrial(attempt, solution, jail)


class _JailPairTrial(JailedTrial):
    """Jails of a solution and of its tests."""

    async def start(self, next_test: int) -> int | None:
        report = await self._receive_verdict()
        if report is None:
            return None
        if "broken" in report:
            raise InvalidTests(str(report["broken"]))
        if report.get("ready") is True and not report["tests"]:
            raise InvalidTests("the tests have no function test_*")
        return len(report["tests"]) or None

    async def run_test(self, number: int) -> bool | None:
        solution, tests = self.jails
        self.attempt.start_lap(solution, clock_paused=True)
        self.attempt.start_lap(tests)
        if not await self.attempt.send(tests, {"test": number}):
            return None
        verdict = await self._receive_verdict()
        if verdict is None or verdict.get("test") != number or verdict.get("lost") is True:
            return None
        return verdict.get("passed") is True

    async def _receive_verdict(self) -> dict[str, Any] | None:
        """Return the next message of the tests; None if their jail has ended.

        Only messages with the nonce count. UnsupportedTests if the tests need an unsupported
        operation.
        """
        solution, jail = self.jails
        while True:
            frame = await self.attempt.receive(jail, MAX_SOLUTION_WAIT_S)
            if frame is None or frame.get("nonce") != jail.nonce:
                return None
            if "unsupported" in frame:
                what = f"the runner isolated cannot run: {frame['unsupported']}"
                raise UnsupportedTests(what, is_caused_by_solution=frame.get("by_solution") is True)
            if "is_waiting" not in frame:
                return frame
            solution.set_clock_running(frame["is_waiting"] is True)
