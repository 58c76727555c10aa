"""Tests that call a function with JSON values; its results are compared outside of its jail."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from meshrl.common.grading.cases import FunctionCase
from meshrl.common.grading.isolated_support import UnsupportedTests
from meshrl.services.sandbox.grading.code import attempt as attempts
from meshrl.services.sandbox.grading.code.attempt import GradingAttempt, JailedTrial
from meshrl.services.sandbox.grading.code.comparison import is_equal
from meshrl.services.sandbox.isolation.jails.jail import Jail
from meshrl.services.sandbox.isolation.jails.pipes import FRAME_BYTES
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.jail.wire import frames, plain_data

MAX_ANSWER_FACTOR = 8  # times the expected JSON that an answer may take: escapes, and wrong ones


async def run_tests(
    attempt: GradingAttempt, source: str, function: str, cases: list[FunctionCase]
) -> list[bool]:
    for case in cases:
        size = len(frames.pack(_encode_arguments(case)))
        if size > frames.MAX_FRAME_BYTES - FRAME_BYTES:  # more than a jail reads at once
            most = f"the limit is {frames.MAX_FRAME_BYTES >> 20} MiB"
            raise UnsupportedTests(f"arguments of {size} bytes as JSON; {most}")
    program = JailProgram(source, "calls", function, is_graded=True)

    async def trial() -> _FunctionTrial:
        jail = await attempt.launcher.open(program, attempt.limits)
        return _FunctionTrial(attempt, jail, cases)

    async with attempt.slots.acquire():
        return await attempts.run_trials(attempt, trial, len(cases))


class _FunctionTrial(JailedTrial):
    """Calls that one jail serves."""

    def __init__(self, attempt: GradingAttempt, jail: Jail, cases: list[FunctionCase]) -> None:
        super().__init__(attempt, jail)
        self._jail, self._cases = jail, cases

    async def start(self, next_test: int) -> int | None:
        return len(self._cases) if await self._call(None) is not None else None

    async def run_test(self, number: int) -> bool | None:
        case = self._cases[number]
        answer, near = await self._call(case), self.attempt.tolerance
        if answer is None or "value" not in answer:
            return None if answer is None else False
        return any(is_equal(answer["value"], accepted, near) for accepted in case.accepted_results)

    async def _call(self, case: FunctionCase | None) -> dict[str, Any] | None:
        """Return the guest's answer to a call, or to its start without one; None if it has ended.

        The clock of a start is paused, until the start has taken as long as a case may.
        """
        attempt, jail, token = self.attempt, self._jail, secrets.token_hex(8)
        assert jail.guest_channel is not None
        if case:
            attempt.start_lap(jail)
            accepted_sizes = (
                len(json.dumps(plain_data.to_jsonable(value))) for value in case.accepted_results
            )
            jail.guest_channel.raise_frame_limit(MAX_ANSWER_FACTOR * max(accepted_sizes))
            if not await attempt.send(jail, {"call": token, **_encode_arguments(case)}):
                return None
        waited = asyncio.ensure_future(attempt.receive(jail))
        ends = {waited, jail.output.over_limit}
        try:
            if not case:
                limit_s = attempt.limits.wall_s
                await asyncio.wait(ends, timeout=limit_s, return_when="FIRST_COMPLETED")
                jail.set_clock_running(not waited.done())
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
            if not case:
                jail.set_clock_running(False)
            found = waited.result() if waited.done() else None
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)
        return found if not case or (found and found.get("call") == token) else None


def _encode_arguments(case: FunctionCase) -> dict[str, Any]:
    return {
        "args": plain_data.to_jsonable(case.args),
        "kwargs": plain_data.to_jsonable(case.kwargs),
    }
