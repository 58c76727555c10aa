"""Tests in Python in a jail of their own, which uses the solution's objects across a pipe.

See `jail.objects` for what may be asked of the solution, and `jail.testing` for what runs the
tests. No code that the model wrote has ever been in the tests' jail.

The solution's wall clock runs while its tests wait for it: they say so once they have waited for
longer than a part of the case's limit, so most questions cost no word about whose turn it is.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from typing import Any

from meshrl.common.grading.cases import BadTests
from meshrl.common.grading.support import Unsupported
from meshrl.services.sandbox.grading.code import attempt as attempts
from meshrl.services.sandbox.grading.code.attempt import Attempt, JailedTrial
from meshrl.services.sandbox.isolation.jails.jail import SLOWEST
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources.limits import MIB

TESTS_BYTES = 256 * MIB  # memory of the jail that holds tests in Python
WAITING_S = 10.0  # longest wait of the tests for their solution, beside their own time
UNTOLD = 0.25  # of a case's limit: waiting for the solution that its clock need not know of


async def passed(attempt: Attempt, source: str, tests: str) -> list[bool]:
    async with attempt.slots.one():
        return await attempts.passed(attempt, lambda: _pair(attempt, source, tests))


async def _pair(attempt: Attempt, source: str, tests: str) -> _Pair:
    """The solution's jail, and that of its tests, which speak through a socket pair."""
    launcher, limits = attempt.launcher, attempt.limits
    one, other = socket.socketpair()
    with one, other, contextlib.ExitStack() as undone:
        solution = await launcher.open(Program(source, "objects"), limits, peer=one.fileno())
        undone.callback(solution.close)
        files = launcher.tier != "landlock"  # there, /tmp is that of the host
        program = Program(tests, "tests", files=files, patience_s=UNTOLD * limits.wall_s)
        # By the clock the tests also wait for the solution; CPU time counts as ever.
        limits = replace(limits, wall_s=SLOWEST * limits.wall_s + WAITING_S)
        limits = limits.capped(memory_bytes=TESTS_BYTES)
        jail = await launcher.open(program, limits, peer=other.fileno())
        undone.pop_all()
        return _Pair(attempt, solution, jail)


class _Pair(JailedTrial):
    """The jails of a solution and of its tests."""

    async def begin(self, number: int) -> int | None:
        said = await self._said()
        if said is None:
            return None
        if "broken" in said:
            raise BadTests(str(said["broken"]))
        if said.get("ready") is True and not said["tests"]:
            raise BadTests("there is no function test_*")
        return len(said["tests"]) or None

    async def passes(self, number: int) -> bool | None:
        solution, tests = self.jails
        self.attempt.lap(solution, waits=True)
        self.attempt.lap(tests)
        if not await self.attempt.tell(tests, {"test": number}):
            return None
        verdict = await self._said()
        if verdict is None or verdict.get("test") != number or verdict.get("lost") is True:
            return None
        return verdict.get("passed") is True

    async def _said(self) -> dict[str, Any] | None:
        """The next word of the tests; None if their jail has ended. Only words that carry the nonce
        count. Unsupported if they ask for what cannot be done.
        """
        solution, jail = self.jails
        while True:
            frame = await self.attempt.word(jail, WAITING_S)
            if frame is None or frame.get("nonce") != jail.nonce:
                return None
            if "unsupported" in frame:
                what = f"the runner isolated cannot run: {frame['unsupported']}"
                raise Unsupported(what, provoked=frame.get("provoked") is True)
            if "turn" not in frame:
                return frame
            solution.turn(frame["turn"] is True)
