"""Tests that call a function with JSON values: what it returns is compared outside of its jail."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from meshrl.common.grading.cases import Called
from meshrl.common.grading.support import Unsupported
from meshrl.services.sandbox.grading.code import attempt as attempts
from meshrl.services.sandbox.grading.code.attempt import Attempt, JailedTrial
from meshrl.services.sandbox.grading.code.equality import same
from meshrl.services.sandbox.isolation.jails.jail import Jail
from meshrl.services.sandbox.isolation.jails.pipes import FRAME_BYTES
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.jail.wire import frames, plain

SPACES = 8  # times what is wanted, as JSON, that an answer may take: escapes, and wrong ones


async def passed(attempt: Attempt, source: str, function: str, cases: list[Called]) -> list[bool]:
    for case in cases:
        size = len(frames.pack(_packed(case)))
        if size > frames.LIMIT - FRAME_BYTES:  # more than a jail reads at once
            most = f"{frames.LIMIT >> 20} MiB at most"
            raise Unsupported(f"arguments of {size} bytes as JSON; {most}")
    program = Program(source, "calls", function, graded=True)

    async def trial() -> _Calls:
        jail = await attempt.launcher.open(program, attempt.limits)
        return _Calls(attempt, jail, cases)

    async with attempt.slots.one():
        return await attempts.passed(attempt, trial, len(cases))


class _Calls(JailedTrial):
    """The calls that one jail serves."""

    def __init__(self, attempt: Attempt, jail: Jail, cases: list[Called]) -> None:
        super().__init__(attempt, jail)
        self._jail, self._cases = jail, cases

    async def begin(self, number: int) -> int | None:
        return len(self._cases) if await self._answer(None) is not None else None

    async def passes(self, number: int) -> bool | None:
        case = self._cases[number]
        answer, near = await self._answer(case), self.attempt.tolerance
        if answer is None or "value" not in answer:
            return None if answer is None else False
        return any(same(answer["value"], wanted, near) for wanted in case.accepted)

    async def _answer(self, case: Called | None) -> dict[str, Any] | None:
        """What the guest says to a call, or to nothing at its start; None if it has ended.

        The clock of a start stands, until it has taken as long as a case may.
        """
        attempt, jail, token = self.attempt, self._jail, secrets.token_hex(8)
        assert jail.cells is not None
        if case:
            attempt.lap(jail)
            wanted = (len(json.dumps(plain.jsonable(value))) for value in case.accepted)
            jail.cells.allow(SPACES * max(wanted))
            if not await attempt.tell(jail, {"call": token, **_packed(case)}):
                return None
        waited = asyncio.ensure_future(attempt.word(jail))
        ends = {waited, jail.output.over}
        try:
            if not case:
                limit_s = attempt.limits.wall_s
                await asyncio.wait(ends, timeout=limit_s, return_when="FIRST_COMPLETED")
                jail.turn(not waited.done())
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
            if not case:
                jail.turn(False)
            found = waited.result() if waited.done() else None
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)
        return found if not case or (found and found.get("call") == token) else None


def _packed(case: Called) -> dict[str, Any]:
    return {"args": plain.jsonable(case.args), "kwargs": plain.jsonable(case.kwargs)}
