"""Tests that call a function with JSON values: what it returns is compared outside of its jail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import Any

from common.base.errors import BadMessage, PeerLost
from common.grading.cases import Called
from common.grading.support import Unsupported
from services.sandbox.grading.code.attempt import SEND_S, Attempt, answering
from services.sandbox.grading.code.equality import same
from services.sandbox.isolation.jails.jail import GRACE_S, SLOWEST, Jail
from services.sandbox.isolation.jails.pipes import FRAME_BYTES
from services.sandbox.jail.wire import frames, plain

SPACES = 8  # times what is wanted, as JSON, that an answer may take: escapes, and wrong ones


async def passed(attempt: Attempt, source: str, function: str, cases: list[Called]) -> list[bool]:
    """Which of the cases the function passes. One jail serves all calls, and another goes on after
    the one in which it ended.
    """
    found: list[bool] = []
    for case in cases:
        _sendable(case)
    program = {"mode": "calls", "source": source, "function": function, "graded": True}
    async with attempt.slots.one():
        while len(found) < len(cases) and not attempt.over(found):
            jail = await attempt.launcher.open(program, attempt.limits, cells=True, stands=True)
            try:
                if await _answer(attempt, jail, None) is None:
                    if await attempt.blames(jail):  # it does not even load
                        break
                    continue
                while len(found) < len(cases) and not attempt.over(found):
                    answer = await _answer(attempt, jail, cases[len(found)])
                    if answer is None and not await attempt.blames(jail):
                        break  # another jail is asked
                    found.append(_right(attempt, answer, cases[len(found)]))
                    if answer is None:
                        attempt.late += 1
                        break
            finally:
                jail.close()
    return found + [False] * (len(cases) - len(found))


async def _answer(attempt: Attempt, jail: Jail, case: Called | None) -> dict[str, Any] | None:
    """What the guest says to a call, or to nothing at its start; None if it has ended.

    The clock of a start stands, until it has taken as long as a case may.
    """
    assert jail.cells is not None
    token = secrets.token_hex(8)
    with contextlib.suppress(PeerLost, BadMessage), answering():
        if case:
            jail.lap()
            jail.output.left = attempt.limits.output_bytes
            jail.cells.allow(SPACES * max(_size(value) for value in case.accepted))
            asked = {"call": token, **_packed(case)}
            await jail.cells.send(attempt.clock, asked, SEND_S)
        patience = SLOWEST * attempt.limits.wall_s + GRACE_S
        waited = asyncio.ensure_future(jail.cells.receive(attempt.clock, patience))
        ends = {waited, jail.output.over}
        try:
            if not case:
                limit_s = attempt.limits.wall_s
                await asyncio.wait(ends, timeout=limit_s, return_when="FIRST_COMPLETED")
                jail.turn(not waited.done())
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
            if not case:
                jail.turn(False)
            if waited.done():
                found: dict[str, Any] = waited.result()
                return found if not case or found.get("call") == token else None
        finally:
            waited.cancel()
            await asyncio.gather(waited, return_exceptions=True)
    return None


def _right(attempt: Attempt, answer: dict[str, Any] | None, case: Called) -> bool:
    if answer is None or "value" not in answer:
        return False
    return any(same(answer["value"], wanted, attempt.tolerance) for wanted in case.accepted)


def _packed(case: Called) -> dict[str, Any]:
    return {"args": plain.jsonable(case.args), "kwargs": plain.jsonable(case.kwargs)}


def _size(value: Any) -> int:
    return len(json.dumps(plain.jsonable(value)))


def _sendable(case: Called) -> None:
    """Unsupported if the arguments do not fit into what a jail reads at once."""
    size = len(frames.pack(_packed(case)))
    if size > frames.LIMIT - FRAME_BYTES:
        raise Unsupported(f"arguments of {size} bytes as JSON; {frames.LIMIT >> 20} MiB at most")
